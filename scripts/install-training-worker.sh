#!/bin/sh
# Makes this machine a host of a Strata fleet, or undoes that. Running it again upgrades the agent.
set -eu
umask 022

usage() {
    cat <<'END'
Usage: install-training-worker.sh --hub URL [options]
       install-training-worker.sh --uninstall [--force] [options]

Installs the agent, joins the hub at URL, and installs a systemd service that starts the agent with the machine.
The join token, which 'strata invite' prints, is read from stdin, from a file or from the variable STRATA_JOIN_TOKEN,
never from the command line.

  --hub URL          address of the hub, https://…
  --token-file FILE  read the join token from FILE (default: STRATA_JOIN_TOKEN, a prompt, or stdin)
  --from WHAT        install this wheel, folder or package name (default: the clone that holds this script)
  --name NAME        name of this machine in the fleet (default: its host name)
  --python PYTHON    Python 3.11 or newer that every user can execute (default: python3)
  --run-as USER      run jobs as USER, who cannot read the agent's credentials; the agent then runs as root
  --prefix FOLDER    install into FOLDER as the current user, without users and without a service
  --dry-run          print the commands without running them
  --uninstall        leave the fleet and remove everything, also files of jobs; the user of --run-as stays
  --force            with --uninstall: go on if the hub cannot be reached
END
}

# Removed from the environment at once, so that no program inherits it.
token=${STRATA_JOIN_TOKEN:-}
unset STRATA_JOIN_TOKEN

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=install-steps.sh
. "$root/scripts/install-steps.sh"
# shellcheck disable=SC2034 # the steps read it
program=install-training-worker

hub='' token_file='' name='' run_as='' uninstall='' force=''
while [ $# -gt 0 ]; do
    case $1 in
    --hub | --token-file | --from | --name | --python | --run-as | --prefix)
        check_value "$@"
        case $1 in
        --hub) hub=$2 ;;
        --token-file) token_file=$(absolute "$2") ;;
        --from) from=$2 ;;
        --name) name=$2 ;;
        --python) python=$2 ;;
        --run-as) run_as=$2 ;;
        --prefix) prefix=$(absolute "$2") ;;
        esac
        shift 2
        ;;
    --dry-run) dry=yes && shift ;;
    --uninstall) uninstall=yes && shift ;;
    --force) force=--force && shift ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        # Not repeated: it may be the token.
        usage >&2
        die "unknown argument; a token is read from stdin or from a file, never from here"
        ;;
    esac
done

if [ -n "$from" ] && [ -e "$from" ]; then
    from=$(absolute "$from")
fi
from=${from:-$root}
units=$root/deploy/systemd
pins=$root/constraints-agent.txt
cd /

# Not /opt/strata: a hub on the same machine has its program there.
venv=$prefix/opt/strata-agent
home=$prefix/var/lib/strata-agent
state=$home/state
work=$home/work
settings=$prefix/etc/strata/agent.env
unit=$prefix/etc/systemd/system/strata-agent.service
drop_in=$unit.d/run-as.conf
strata=$venv/bin/strata

# The user whom the agent runs as.
user='strata-agent'
[ -z "$run_as" ] || user=root
[ -z "$prefix" ] || user=$(id -un)

check() {
    if [ -z "$prefix" ] && ! is_root; then
        die "run this as root, or use --prefix FOLDER to install for yourself"
    fi
    [ -z "$prefix" ] || [ -z "$run_as" ] || die "--run-as cannot be combined with --prefix: it needs an installation as root"
}

check_units() {
    [ -z "$prefix" ] || return 0
    check_unit "$units/strata-agent.service"
    [ -z "$run_as" ] || check_unit "$units/strata-agent.service.d/run-as.conf"
}

# What is there was written by the agent and, without --run-as, by its jobs as well: another user must not trust it, and
# root least of all.
check_folders() {
    for folder in "$home" "$state"; do
        [ ! -h "$folder" ] || die "$folder is a link; remove it: the agent is not installed through links"
        if [ -e "$folder" ] && [ "$(stat -c %U "$folder")" != "$user" ]; then
            die "$folder does not belong to $user, and jobs may have written there; run --uninstall, then join again"
        fi
    done
}

check_token() {
    [ -z "$token_file" ] || [ -r "$token_file" ] || die "$token_file cannot be read"
    if [ -n "$token_file" ] && [ -n "$(find "$token_file" -perm /077)" ]; then
        die "$token_file can be read by others; run: chmod 600 $token_file"
    fi
}

make_user_of_jobs() { # NAME HOME
    make_user "$1" "$2"
    # Groups that GPUs may belong to.
    for group in video render; do
        if getent group "$group" >/dev/null; then
            quietly usermod --append --groups "$group" "$1"
        fi
    done
}

make_users() {
    [ -z "$prefix" ] || return 0
    if [ -n "$run_as" ]; then
        make_user_of_jobs "$run_as" "/var/lib/$run_as"
        quietly mkdir -p "/var/lib/$run_as"
        quietly chown "$run_as:" "/var/lib/$run_as"
        quietly chmod 0700 "/var/lib/$run_as"
    else
        make_user_of_jobs "$user" "$home"
    fi
}

make_folders() {
    quietly mkdir -p "$home" "$(dirname "$settings")"
    [ -n "$prefix" ] || quietly chown -h "$user:" "$home"
    # From here on as the agent: in a folder of its own, root could be led anywhere by a link.
    as_user chmod 0711 "$home" </dev/null
    as_user mkdir -p "$state" </dev/null
    as_user chmod 0700 "$state" </dev/null
    if [ ! -e "$settings" ]; then
        quietly touch "$settings"
        quietly chmod 0600 "$settings"
    fi
}

join() {
    as_user "$strata" agent check --state "$state" --work "$work" </dev/null >&2 ||
        die "the self-test of this machine failed (see BAD above); nothing was sent to the hub"
    set -- "$strata" join "$hub" --state "$state"
    [ -z "$name" ] || set -- "$@" --name "$name"
    if [ -e "$state/identity/hub.json" ]; then
        as_user "$@" </dev/null
    elif [ -n "$token_file" ]; then
        as_user "$@" <"$token_file"
    elif [ -n "$token" ]; then
        # A builtin of the shell: no process has the token among its arguments.
        printf '%s\n' "$token" | as_user "$@"
    else
        as_user "$@"
    fi
}

write_unit() {
    [ -z "$prefix" ] || return 0
    quietly install -D -m 0644 "$units/strata-agent.service" "$unit"
    if [ -n "$run_as" ]; then
        quietly install -D -m 0644 "$units/strata-agent.service.d/run-as.conf" "$drop_in"
        quietly sed -i "s/strata-job/$run_as/g" "$drop_in"
    else
        quietly rm -f "$drop_in"
    fi
}

start() {
    if has_systemd; then
        quietly systemctl daemon-reload
        quietly systemctl enable strata-agent.service
        # A running agent hands its jobs over to the new one.
        quietly systemctl reload-or-restart strata-agent.service
        say "the agent is running; see systemctl status strata-agent and journalctl -u strata-agent"
        return
    fi
    say "there is no systemd to start the agent with the machine; start it with"
    set -- "$strata" agent --state "$state" --work "$work"
    [ -z "$run_as" ] || set -- env "STRATA_AGENT_RUN_AS=$run_as" "$@"
    show_as_user "$@"
}

remove() {
    if has_systemd && [ -e "$unit" ]; then
        quietly systemctl disable --now strata-agent.service
    fi
    if [ -d "$state" ]; then
        [ -x "$strata" ] || [ -n "$force" ] || die "$strata is missing, so this machine cannot leave its hub; use --force to remove the rest"
    fi
    if [ -x "$strata" ] && [ -d "$state" ]; then
        # The owner of the credentials is the agent's user.
        [ -n "$prefix" ] || user=$(stat -c %U "$state")
        # shellcheck disable=SC2086 # empty or one word
        as_user "$strata" leave --state "$state" $force </dev/null ||
            die "this machine is still a host of its hub, and nothing was removed; use --force to remove it anyway"
    fi
    quietly rm -f "$unit" "$drop_in" "$settings"
    [ ! -d "$unit.d" ] || quietly rmdir --ignore-fail-on-non-empty "$unit.d"
    quietly rm -rf "$venv" "$home"
    has_systemd && quietly systemctl daemon-reload
    if [ -z "$prefix" ] && id strata-agent >/dev/null 2>&1; then
        quietly userdel strata-agent
    fi
    say "the agent is removed"
}

check
take_turn
if [ -n "$uninstall" ]; then
    remove
    exit 0
fi
[ -n "$hub" ] || {
    usage >&2
    die "--hub is missing"
}
check_units
check_folders
check_python
check_token
make_users
make_folders
install_package agent "$pins"
join
write_unit
start
