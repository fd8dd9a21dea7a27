#!/usr/bin/env bash
# From a clone to a model of one's own texts in transformers: each command with its output and its time, as Markdown.
#
#   docs/first_model.sh ADDRESS TEXTS >docs/pages/guides/first_model.md     (in an empty folder; TEXTS: a full path)
set -euo pipefail

ADDRESS=$1 TEXTS=$2 START=$SECONDS

# The command, the last lines of what it prints, and how long it took.
step() {
  local begun=$SECONDS shown=${1//"$TEXTS"/my_texts}
  printf '```console\n$ %s\n' "${shown//"$ADDRESS"/<address>}"
  bash -c "$1" >step.log 2>&1 || { cat step.log >&2 && exit 1; }
  tr '\r' '\n' <step.log | grep -v '^ *$' | tail -n "$2" | cut -c1-200 || true
  printf '```\n\n%s\n\n' "$((SECONDS - begun)) seconds."
}

cat <<END
# From a clone to your own model

Every command of this page was run, one after the other, by \`docs/first_model.sh\`: on $(nproc) cores
($(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)), without a GPU, on $(date -u +%Y-%m-%d). The texts are
$(du -sbL "$TEXTS" | awk '{printf "%.0f", $1 / 1e6}') MB: $(cd "$TEXTS" && find . -type f -printf '%f ' | sed 's/ $//; s/ /, /g; s/\\(.*\\), /\\1 and /').

END
step "git clone -q --depth 1 $ADDRESS lmcore && git -C lmcore log -1 --oneline" 1
cd lmcore
step 'make install' 0
export PATH=$PWD/.venv/bin:$PATH
step "lmcore train --data $(printf %q "$TEXTS") --preset laptop --steps 200 --run runs/mine" 3
step 'lmcore generate runs/mine --prompt "Once upon a time" --temperature 0.8 --max-new-tokens 80' 8
step 'lmcore export runs/mine exported/mine' 4
cat >reload.py <<'END'
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("exported/mine")
model = AutoModelForCausalLM.from_pretrained("exported/mine")
ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0]))
END
# shellcheck disable=SC2016
printf '%s\n' 'The file `reload.py`:' '' '```python' "$(cat reload.py)" '```' ''
step 'python reload.py' 4
step 'lmcore generate runs/mine --prompt "Once upon a time" --temperature 0 --max-new-tokens 40' 4
printf 'All of it took %s minutes and %s seconds.\n\n' "$(((SECONDS - START) / 60))" "$(((SECONDS - START) % 60))"
printf 'The whole preset, which trains twice as long:\n\n'
step "lmcore train --data $(printf %q "$TEXTS") --preset laptop --run runs/whole" 3
step 'lmcore runs runs' 4
