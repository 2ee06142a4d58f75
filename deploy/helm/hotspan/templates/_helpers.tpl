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

{{/* The secret with the L2's password, as YAML; nothing without one. Valkey always has one: see secrets.yaml. */}}
{{- define "hotspan.l2Password" -}}
{{- $isOurs := eq .Values.l2.kind "valkey" -}}
{{- $secret := ternary .Values.valkey.passwordSecret .Values.l2.passwordSecret $isOurs -}}
{{- if $secret.name -}}
{{- if ne .Values.l2.kind "none" -}}{{- toYaml $secret -}}{{- end -}}
{{- else if $isOurs -}}
{{- dict "name" (printf "%s-valkey" (include "hotspan.name" .)) "key" $secret.key | toYaml -}}
{{- end -}}
{{- end -}}

{{/* The secret with the key of KV events, as YAML; nothing without events. */}}
{{- define "hotspan.eventsKey" -}}
{{- if .Values.router.kvEvents -}}
{{- $secret := .Values.router.kvEventsSecret -}}
{{- dict "name" ($secret.name | default (printf "%s-kv-events" (include "hotspan.name" .))) "key" $secret.key | toYaml -}}
{{- end -}}
{{- end -}}

{{/* The release's own directory in one that pods of a node share; takes {root, path}. Neither a namespace nor a release
can have a _ in its name: "a-b" with "c" and "a" with "b-c" have two directories. */}}
{{- define "hotspan.onNode" -}}
{{- printf "%s/%s_%s" .path .root.Release.Namespace (include "hotspan.name" .root) -}}
{{- end -}}

{{/* The ports that replicas reach outside of the release, as a JSON list of numbers. */}}
{{- define "hotspan.outside" -}}
{{- $ports := list -}}
{{- if or (not (hasPrefix "/" .Values.model)) .Values.encryption.kek (hasPrefix "s3:" .Values.l2.url) -}}
{{- $ports = append $ports 443 -}}
{{- end -}}
{{- range list .Values.l2.url .Values.l2.log -}}
{{- with include "hotspan.portOf" . -}}{{- $ports = append $ports (int .) -}}{{- end -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}

{{/* The port of a URL: its own, or that of its scheme; empty for a directory. */}}
{{- define "hotspan.portOf" -}}
{{- $own := regexFind ":[0-9]+([/?]|$)" . | trimPrefix ":" | trimSuffix "/" | trimSuffix "?" -}}
{{- $usual := get (dict "redis" "6379" "rediss" "6379" "s3" "443" "sagemaker-hyperpod" "9200" "file" "") (regexFind "^[a-z0-9+-]+" .) -}}
{{- $own | default $usual -}}
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

{{/* The files of secrets that router and replicas read, as {NAME: {name, key}}. */}}
{{- define "hotspan.secretFiles" -}}
{{- $files := dict -}}
{{- if .Values.auth.tenantsSecret.name -}}{{- $_ := set $files "tenants.yaml" .Values.auth.tenantsSecret -}}{{- end -}}
{{- with include "hotspan.eventsKey" . | fromYaml -}}{{- $_ := set $files "events.key" . -}}{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{/* The init container that makes files of secrets such as hotspan takes; nothing without any. */}}
{{- define "hotspan.initSecrets" -}}
{{- with include "hotspan.secretFiles" . | fromYaml -}}
# Kubernetes gives files of secrets to a group; hotspan takes secrets only from files that it alone can read.
- name: secrets
  command: [install, -m, "0600"{{ range $file, $_ := . }}, /etc/hotspan/given/{{ $file }}{{ end }}, /etc/hotspan/own/]
  {{- include "hotspan.ours" $ | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: given, mountPath: /etc/hotspan/given, readOnly: true}
    - {name: own, mountPath: /etc/hotspan/own}
{{- end -}}
{{- end -}}

{{- define "hotspan.secretVolumes" -}}
{{- with include "hotspan.secretFiles" . | fromYaml -}}
- name: given
  projected:
    defaultMode: 0440
    sources:
      {{- range $file, $secret := . }}
      - secret: {name: {{ $secret.name }}, items: [{key: {{ $secret.key }}, path: {{ $file }}}]}
      {{- end }}
- {name: own, emptyDir: {medium: Memory, sizeLimit: 8Mi}}
{{- end -}}
{{- end -}}

{{- define "hotspan.secretMounts" -}}
{{- if include "hotspan.secretFiles" . | fromYaml -}}
- {name: own, mountPath: /etc/hotspan/own, readOnly: true}
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
