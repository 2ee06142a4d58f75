{{- define "hotspan.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of a part; takes {root, part}. */}}
{{- define "hotspan.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "hotspan.labels" -}}
{{ include "hotspan.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "hotspan.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "hotspan.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "hotspan.name" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* What all pods of ours have: no token of the API, no root, no variables of services. */}}
{{- define "hotspan.pod" -}}
serviceAccountName: {{ include "hotspan.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "hotspan.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "hotspan.ours" -}}
{{ include "hotspan.container" . }}
image: {{ include "hotspan.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/* The address of the L2; empty without one. */}}
{{- define "hotspan.l2" -}}
{{- if eq .Values.l2.kind "daemon" -}}
sagemaker-hyperpod://{{ include "hotspan.name" . }}-daemon:9200
{{- else if eq .Values.l2.kind "valkey" -}}
{{- if .Values.valkey.tlsSecret -}}
rediss://{{ include "hotspan.name" . }}-valkey:6379?ssl_ca_certs=/etc/hotspan/valkey/ca.crt
{{- else -}}
redis://{{ include "hotspan.name" . }}-valkey:6379
{{- end -}}
{{- else if eq .Values.l2.kind "external" -}}
{{- .Values.l2.url -}}
{{- end -}}
{{- end -}}

{{/* The secret with the L2's password, as YAML; nothing without one. */}}
{{- define "hotspan.l2Password" -}}
{{- $secret := ternary .Values.valkey.passwordSecret .Values.l2.passwordSecret (eq .Values.l2.kind "valkey") -}}
{{- if and $secret.name (ne .Values.l2.kind "none") -}}
{{- toYaml $secret -}}
{{- end -}}
{{- end -}}

{{- define "hotspan.isEncrypted" -}}
{{- if or .Values.encryption.kek .Values.encryption.kekSecret.name -}}true{{- end -}}
{{- end -}}

{{/* What values together can't mean; a schema sees one value at a time. */}}
{{- define "hotspan.check" -}}
{{- if not .Values.model -}}
{{- fail "model is empty: give a hub id, s3://BUCKET/PREFIX or a path such as /opt/ml/model with modelVolume" -}}
{{- end -}}
{{- if not (or .Values.auth.tenantsSecret.name .Values.auth.insecure) -}}
{{- fail "nobody would need a key: give auth.tenantsSecret.name, or auth.insecure=true if the network keeps strangers out" -}}
{{- end -}}
{{- if and (eq .Values.l2.kind "external") (not .Values.l2.url) -}}
{{- fail "l2.kind is external without l2.url: give one, such as rediss://HOST:6379" -}}
{{- end -}}
{{- if and .Values.l2.url (ne .Values.l2.kind "external") -}}
{{- fail "l2.url is given, but l2.kind is not external: set l2.kind=external, or leave l2.url out" -}}
{{- end -}}
{{- if and (include "hotspan.isEncrypted" .) (not .Values.encryption.keyStoreClaim) -}}
{{- fail "encryption needs encryption.keyStoreClaim: a claim with the key store that `hotspan keys init` made" -}}
{{- end -}}
{{- if and .Values.encryption.kek .Values.encryption.kekSecret.name -}}
{{- fail "encryption.kek and encryption.kekSecret.name are two keys: give one" -}}
{{- end -}}
{{- if and .Values.router.kvEvents (not (and .Values.router.enabled .Values.modelVolume)) -}}
{{- fail "router.kvEvents needs the router, and modelVolume with the model's tokenizer: events name tokens" -}}
{{- end -}}
{{- if and .Values.replicas.most (lt (int .Values.replicas.most) (int .Values.replicas.count)) -}}
{{- fail "replicas.most is less than replicas.count: give as many at least, or 0" -}}
{{- end -}}
{{- end -}}

{{/* The init container that makes the tenants' file one that hotspan takes; nothing without tenants. */}}
{{- define "hotspan.initSecrets" -}}
{{- if .Values.auth.tenantsSecret.name -}}
initContainers:
  # Kubernetes gives files of secrets to a group; hotspan takes secrets only from files that it alone can read.
  - name: secrets
    command: [install, -m, "0600", /etc/hotspan/given/tenants.yaml, /etc/hotspan/own/tenants.yaml]
    {{- include "hotspan.ours" . | nindent 4 }}
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      - {name: tenants, mountPath: /etc/hotspan/given, readOnly: true}
      - {name: own, mountPath: /etc/hotspan/own}
{{- end -}}
{{- end -}}

{{- define "hotspan.secretVolumes" -}}
{{- with .Values.auth.tenantsSecret -}}
{{- if .name -}}
- name: tenants
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
    items: [{key: {{ .key }}, path: tenants.yaml}]
- {name: own, emptyDir: {medium: Memory, sizeLimit: 8Mi}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "hotspan.adminToken" -}}
{{- with .Values.auth.adminTokenSecret -}}
{{- if .name -}}
- name: HOTSPAN_ADMIN_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end -}}
{{- end -}}
{{- end -}}
