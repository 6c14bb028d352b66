#!/usr/bin/env bash
# An agent on arm64 against a hub of this machine: join, probe, claim, run, complete. As root, on Debian:
#
#     apt-get install qemu-user-static debootstrap
#     scripts/e2e-arm64.sh [FOLDER]
#
# A small arm64 system is made in FOLDER once (two minutes) and kept; qemu runs its programs. The packages of the system
# are unpacked and not configured, which takes a sixth of the time and is enough for Python. Nothing is compiled: that all
# wheels exist for arm64 is part of what is tested.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(realpath -m "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/strata-arm64}")
root=$folder/root
strata=$PWD/.venv/bin/strata
python=$PWD/.venv/bin/python
user=1000
programs=()

for program in qemu-aarch64-static debootstrap; do
    command -v "$program" >/dev/null || { echo "missing: $program" >&2; exit 1; }
done
[ "$(id -u)" -eq 0 ] || { echo 'chroot and mounts need root' >&2; exit 1; }

work=$(mktemp -d)
clean_up() {
    local status=$?
    [ "${#programs[@]}" -eq 0 ] || { kill "${programs[@]}" && wait "${programs[@]}"; } 2>/dev/null || true
    umount "$root/proc" "$root/dev" 2>/dev/null || true
    if [ "$status" -eq 0 ]; then rm -rf "$work"; else echo "FAILED with status $status; what was said lies in $work" >&2; fi
    exit "$status"
}
trap clean_up EXIT

shown() { # COMMAND...: as in a terminal
    local words=()
    for word in "$@"; do words+=("${word/#$strata/strata}"); done
    printf '$ %s\n' "${words[*]}"
    "$@" 2>&1
}

# On arm64, as a user without rights.
there=(chroot --userspec="$user:$user" "$root" env HOME=/home/pi PATH=/opt/strata/bin:/usr/bin STRATA_AGENT_MIN_FREE_GIB=0)

shown_there() { # COMMAND...
    printf 'pi$ %s\n' "$*"
    "${there[@]}" "$@" 2>&1
}

make_system() {
    [ ! -e "$folder/made" ] || return 0
    rm -rf "$root"
    mkdir -p "$folder"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,python3-venv bookworm "$root" >"$folder/debootstrap.log"
    for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    install -d -o "$user" -g "$user" "$root/home/pi"
    chroot "$root" python3 -m venv /opt/strata
    touch "$folder/made"
}

let_the_kernel_run_it() {
    local formats=/proc/sys/fs/binfmt_misc
    [ -e $formats/register ] || mount -t binfmt_misc binfmt_misc $formats
    [ -e $formats/qemu-aarch64 ] || cat /usr/lib/binfmt.d/qemu-aarch64.conf >$formats/register
}

install_strata() { # the base install, and what joining over TLS needs
    local wheels=$root/wheels platforms=()
    rm -rf "$wheels"
    "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" .
    for glibc in 2_34 2_28 2_17; do platforms+=(--platform "manylinux_${glibc}_aarch64"); done
    "$python" -m pip download --quiet --only-binary=:all: --python-version 3.11 "${platforms[@]}" --platform manylinux2014_aarch64 \
        --dest "$wheels" "$wheels"/strata_train-*.whl 'cryptography>=46' 2>&1 | grep -v '^WARNING: Location' || true
    # Without the settings of this machine, which name folders that are not there.
    chroot "$root" env -i PATH=/usr/bin /opt/strata/bin/pip install --quiet --no-index --find-links /wheels --force-reinstall \
        strata-train cryptography
}

write_project() {
    mkdir "$work/project"
    cat >"$work/project/train.py" <<'PYTHON'
import json, platform
from strata.fleet.trainer import output_folder, report

slope, points = 0.0, [(x / 10, 3 * x / 10) for x in range(10)]
for step in range(1, 51):
    slope -= 0.5 * sum((slope * x - y) * x for x, y in points) / len(points)
    report(step=step, loss=sum((slope * x - y) ** 2 for x, y in points))
output_folder().mkdir(exist_ok=True)
(output_folder() / "model.json").write_text(json.dumps({"slope": round(slope, 3), "machine": platform.machine()}))
print(f"slope {slope:.3f}, found on {platform.machine()}")
PYTHON
    cat >"$work/project/manifest.toml" <<'TOML'
[trainers.default]
command = ["python", "train.py"]
directory = "."

[[jobs]]
model = "line"
mode = "arm"
require_arch = "aarch64"

[[jobs]]
model = "line"
mode = "other"
require_arch = "x86_64"
TOML
}

started() { # LOG PATTERN: wait until a program said so
    for _ in $(seq 600); do
        grep -q "$2" "$1" && return 0
        sleep 0.2
    done
    cat "$1" >&2
    return 1
}

make_system_s=$SECONDS
let_the_kernel_run_it
make_system
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
install_strata
write_project
echo "# the arm64 system was ready after $((SECONDS - make_system_s)) s"

export HOME=$work COLUMNS=80
unset XDG_CONFIG_HOME XDG_DATA_HOME
STRATA_HUB_KEEP_FREE_BYTES=0 "$strata" hub --tls --listen 127.0.0.1:0 --name 127.0.0.1 --data "$work/hub" >"$work/hub.log" 2>&1 &
programs+=($!)
started "$work/hub.log" 'listening on'
url=$(grep -o 'https://[0-9.:]*' "$work/hub.log" | head -1)
pin=$("$python" -c 'import sys; from strata.sdk.fleet import fetch_authority, pin_of; print(pin_of(fetch_authority(sys.argv[1])))' "$url")
"$strata" login "$url" --name hub --ca-pin "$pin" --token-file "$work/hub/operator.token" 2>/dev/null

rm -rf "$root/home/pi/.local"
STRATA_JOIN_TOKEN=$("$strata" invite 2>/dev/null)
export STRATA_JOIN_TOKEN
shown_there strata join "$url" --name pi
unset STRATA_JOIN_TOKEN
shown_there strata agent probe
"${there[@]}" strata agent >"$work/agent.log" 2>&1 &
programs+=($!)
started "$work/agent.log" 'works for'

cd "$work/project"
begun=$SECONDS
shown "$strata" apply --no-describe manifest.toml
shown "$strata" wait line-arm
echo "# $((SECONDS - begun)) s from apply to the end of the job"
shown "$strata" workers
shown "$strata" logs line-arm
shown "$strata" artifacts get line-arm made
shown cat made/model.json
echo
status=0
shown "$strata" why line-other || status=$?
[ "$status" -eq 6 ]
grep -q '"machine": "aarch64"' made/model.json
"$strata" show line-arm -o json | grep -q '"host": "pi"'
kill "${programs[1]}" && wait "${programs[1]}"
echo '# the agent stopped in good order'
