#!/usr/bin/env bash
# Two skills, two teachers, one student: trains SmolLM2 on sums and on differences, distils both runs into one
# model, and prints how much of each teacher's accuracy on held-out problems the student has.
#   benchmarks/opd_smollm2.sh [FOLDER]     one H200; flags of all three runs in FLAGS
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/opd_smollm2}
read -ra flags <<<"${FLAGS:-}"
python=${PYTHON:-python}

train() { # name, arguments: a finished run's folder is $out/name
    local runs
    "$python" run.py --log.dir "$out/$1.runs" "${@:2}" "${flags[@]}"
    runs=("$out/$1.runs"/*/summary.json)
    ln -sfn "$1.runs/$(basename "$(dirname "${runs[-1]}")")" "$out/$1"
}
policy() { # name: the newest checkpoint of that run
    local found=("$out/$1"/checkpoints/step_*/policy)
    echo "${found[-1]}"
}

mkdir -p "$out"
train adder --exp smollm2_arith --data.arithmetic addition --trainer.lr 2e-5
train subtracter --exp smollm2_arith --data.arithmetic subtraction --trainer.lr 2e-5
train student --exp opd_smollm2 --teachers.adder.model "$(policy adder)" \
    --teachers.subtracter.model "$(policy subtracter)"

"$python" - "$out" <<'TABLE'
import json
import sys
from pathlib import Path

said = {name: json.loads((Path(sys.argv[1]) / name / "summary.json").read_text())
        for name in ("adder", "subtracter", "student")}
print(f"{'skill':<12} {'untrained':>9} {'teacher':>8} {'student':>8} {'share':>7}")
for teacher, skill in (("adder", "addition"), ("subtracter", "subtraction")):
    before, after = said["student"]["before"][f"truth {skill}"], said["student"]["after"][f"truth {skill}"]
    taught = said[teacher]["after"]["truth"]
    print(f"{skill:<12} {before:9.3f} {taught:8.3f} {after:8.3f} {after / taught:7.1%}")
TABLE
