#!/usr/bin/env bash
# install_smoke.sh PYTHON DIST: install the wheel in DIST alone into a clean environment, and try what needs no engine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$1" -m venv "$work/venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check install -q "$2"/hotspan-*.whl
cd "$work"  # nothing of the source tree can be imported from here
bin=$work/venv/bin
"$bin/hotspan" --version
"$bin/hotspan" route --help >/dev/null
"$bin/hotspan" daemon --help >/dev/null
"$bin/python" -c 'import hotspan.router.run, hotspan.daemon.server'
"$bin/python" -c 'import hotspan; hotspan.engine_options(ram="1GiB")'
_HOTSPAN_COMPLETE=complete_bash COMP_WORDS="hotspan da" COMP_CWORD=1 "$bin/hotspan" | grep -qx daemon
mkdir model && echo '{}' >model/config.json
status=0
"$bin/hotspan" serve model >said 2>&1 || status=$?
[ "$status" = 2 ] && grep -q 'hotspan\[cpu\]' said || { cat said; exit 1; }
"$bin/python" - <<'P'
from importlib.metadata import entry_points

(plugin,) = entry_points(group="vllm.general_plugins", name="hotspan")
assert plugin.load().__name__ == "register"
P
echo "base install: $(du -sm "$work/venv/lib" | cut -f1) MiB, $("$bin/python" -m pip list 2>/dev/null | tail -n +3 | wc -l) packages"
