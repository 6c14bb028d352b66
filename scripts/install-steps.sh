# shellcheck shell=sh
# The steps that the installers share; they read it, and nobody runs it. What a step needs beyond its arguments stands here
# with its default, and the installer sets it.

program=install
dry=''
prefix=''
python=python3
# What pip installs: a wheel, a folder or the name of a package.
from=''
# The user of the service, and its home.
user=''
home=''
venv=''

say() {
    printf '%s: %s\n' "$program" "$*" >&2
}

die() {
    say "$*"
    exit 1
}

check_value() { # OPTION VALUE...
    case ${2:--} in
    -*) die "$1 needs a value" ;;
    esac
}

absolute() { # PATH
    case $1 in
    /*) printf '%s\n' "$1" ;;
    *) printf '%s/%s\n' "$PWD" "$1" ;;
    esac
}

run() {
    if [ -n "$dry" ]; then
        printf '+ %s\n' "$*"
    else
        "$@"
    fi
}

# Without stdin: a token may be there.
quietly() {
    run "$@" </dev/null
}

# With the home of the service's user, and without the XDG folders of the person who installs.
as_user() {
    set -- env -u XDG_CONFIG_HOME -u XDG_DATA_HOME "HOME=$home" "$@"
    [ "$user" = "$(id -un)" ] || set -- setpriv "--reuid=$user" "--regid=$user" --init-groups "$@"
    run "$@"
}

# As a person would type it.
show_as_user() {
    before=$dry
    dry=yes
    shown=$(as_user "$@")
    dry=$before
    printf '%s\n' "${shown#+ }"
}

has_systemd() {
    [ -z "$prefix" ] && [ -d /run/systemd/system ]
}

is_root() {
    [ "$(id -u)" -eq 0 ] || [ -n "$dry" ]
}

# One run of an installer at a time: two would write the same environment. The lock ends with the shell.
take_turn() {
    [ -z "$dry" ] && command -v flock >/dev/null || return 0
    folder=$(dirname "$venv")
    mkdir -p "$folder"
    exec 9<"$folder"
    flock --nonblock 9 || {
        say "another run installs below $folder; waiting until it ends"
        flock 9
    }
}

check_python() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null ||
        die "$python is not Python 3.11 or newer; name another one with --python"
    "$python" -c 'import ensurepip, venv' </dev/null 2>/dev/null ||
        die "$python cannot make environments; on Debian: apt-get install python3-venv"
}

check_unit() { # FILE
    [ -r "$1" ] || die "$1 is missing; run this script in a whole clone of the repository"
}

make_user() { # NAME HOME
    if ! id "$1" >/dev/null 2>&1; then
        quietly useradd --system --user-group --home-dir "$2" --no-create-home --shell /usr/sbin/nologin "$1"
    fi
}

install_package() { # EXTRAS PINS
    # Root runs what is there.
    if [ -e "$venv" ] && [ "$(stat -c %u "$venv")" -ne "$(id -u)" ]; then
        die "$venv does not belong to $(id -un); move it away"
    fi
    # An environment whose Python is gone is created again.
    if ! "$venv/bin/python" -c '' </dev/null 2>/dev/null; then
        quietly "$python" -m venv --clear "$venv"
    fi
    extras=$1
    pins=$2
    set -- "$venv/bin/python" -m pip --disable-pip-version-check
    if [ -r "$pins" ]; then
        # Only packages with a pinned hash come from the index, also for building the package.
        quietly "$@" install --quiet --require-hashes -r "$pins"
        quietly "$@" install --quiet --upgrade --no-deps --no-build-isolation "${from}[$extras]"
        quietly "$@" check >&2 || die "the versions in $pins do not satisfy $from; use the script and the package of one version"
    else
        quietly "$@" install --quiet --upgrade "${from}[$extras]"
    fi
    [ -z "$dry" ] || return 0
    as_user "$venv/bin/strata" --version </dev/null >/dev/null ||
        die "$user cannot execute $venv/bin/strata; use --python with an interpreter that every user can execute"
}
