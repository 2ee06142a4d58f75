#!/usr/bin/env bash
# register.sh NAME DIRECTORY [SERVER]: register the adapter in DIRECTORY of the server's --adapters, with the formatter
# beside this script, and ask it something. Copy support/formatter.yaml into the adapter's directory first.
set -euo pipefail
name=$1 directory=$2 server=${3:-http://localhost:8080}
hotspan adapters register "$name" "$directory" --server "$server"
hotspan adapters list --server "$server"
curl -sf "$server/invocations" -H 'content-type: application/json' \
  -H "X-Amzn-SageMaker-Adapter-Identifier: $name" \
  -d '{"inputs": "My parcel is late.", "parameters": {"max_new_tokens": 16}}'
echo
