#!/bin/sh
# Makes this machine the hub of a Strata fleet. Running it again upgrades the hub.
set -eu
umask 022

usage() {
    cat <<'END'
Usage: install-hub.sh [options]
       install-hub.sh --uninstall [--dry-run]

Installs the hub as a systemd service of the user strata-hub, with a backup every night. The settings are written to
/etc/strata/hub.toml once; later runs leave them as they are. The hub makes its own operator token at its first start:
no secret is given to this script.

  --name NAME         DNS name or address under which hosts reach the hub (default: the name of this machine)
  --listen HOST:PORT  where the hub listens (default: 0.0.0.0:8443)
  --from WHAT         install this wheel, folder or package name (default: the clone that holds this script)
  --python PYTHON     Python 3.11 or newer that every user can execute (default: python3)
  --dry-run           print the commands without running them
  --uninstall         remove the services and the program; settings, data, backups and the user stay
END
}

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=install-steps.sh
. "$root/scripts/install-steps.sh"
# shellcheck disable=SC2034 # the steps read it
program=install-hub

name='' listen='' uninstall=''
while [ $# -gt 0 ]; do
    case $1 in
    --name | --listen | --from | --python)
        check_value "$@"
        case $1 in
        --name) name=$2 ;;
        --listen) listen=$2 ;;
        --from) from=$2 ;;
        --python) python=$2 ;;
        esac
        shift 2
        ;;
    --dry-run) dry=yes && shift ;;
    --uninstall) uninstall=yes && shift ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        # Not repeated: it may be a secret.
        usage >&2
        die "unknown argument; secrets belong into /etc/strata/hub.toml, never here"
        ;;
    esac
done

if [ -n "$from" ] && [ -e "$from" ]; then
    from=$(absolute "$from")
fi
from=${from:-$root}
units=$root/deploy/systemd
pins=$root/constraints-hub.txt
cd /

user='strata-hub'
home=/var/lib/strata-hub
backups=/var/lib/strata-hub-backups
venv=/opt/strata
settings=/etc/strata/hub.toml
services=/etc/systemd/system
strata=$venv/bin/strata

check_words() {
    # They are written into the settings.
    case $name$listen in
    *[!A-Za-z0-9.:_*[\]-]*) die "--name takes a DNS name or an address, --listen takes HOST:PORT" ;;
    esac
}

check_folders() {
    for folder in "$home" "$backups"; do
        [ ! -h "$folder" ] || die "$folder is a link; remove it: the hub is not installed through links"
        if [ -e "$folder" ] && [ "$(stat -c %U "$folder")" != "$user" ]; then
            die "$folder does not belong to $user; move it away, or give it to that user"
        fi
    done
}

make_folders() {
    for folder in "$home" "$backups"; do
        [ -d "$folder" ] || quietly install -d -m 0700 -o "$user" -g "$user" "$folder"
    done
}

settings_text() {
    printf '[hub]\nlisten = "%s"\n\n[hub.tls]\nenabled = true\n' "${listen:-0.0.0.0:8443}"
    [ -z "$name" ] || printf 'names = ["%s"]\n' "$name"
    printf '\n[hub.backups]\nfolder = "%s"\n' "$backups"
}

write_settings() {
    if [ -e "$settings" ]; then
        [ -z "$name$listen" ] || say "$settings is there already and stays as it is: --name and --listen change nothing"
        return
    fi
    quietly mkdir -p "$(dirname "$settings")"
    if [ -n "$dry" ]; then
        say "would write $settings:"
        settings_text
        return
    fi
    # Under another name until it is whole: the next run would leave half of it as it is.
    settings_text >"$settings.new"
    chown "root:$user" "$settings.new"
    chmod 0640 "$settings.new"
    mv "$settings.new" "$settings"
}

write_units() {
    for unit in strata-hub.service strata-hub-backup.service strata-hub-backup.timer; do
        quietly install -D -m 0644 "$units/$unit" "$services/$unit"
    done
}

has_backups() {
    # Of a dry run the settings may not be there yet.
    [ ! -e "$settings" ] || grep -Eq '^\[hub\.backups\]|^backups *=|^backups\.' "$settings"
}

start() {
    has_backups || say "$settings has no [hub.backups], so no backup is scheduled; see docs/operations-backup.md"
    if has_systemd; then
        quietly systemctl daemon-reload
        quietly systemctl enable strata-hub.service
        quietly systemctl restart strata-hub.service
        if has_backups; then
            quietly systemctl enable --now strata-hub-backup.timer
        fi
        say "the hub was started; whether it serves: systemctl status strata-hub, journalctl -u strata-hub"
        return
    fi
    say "there is no systemd to start the hub with the machine, or to make its backups; start it with"
    show_as_user "$strata" hub --config "$settings" --data "$home"
}

remove() {
    for unit in strata-hub-backup.timer strata-hub-backup.service strata-hub.service; do
        if has_systemd && [ -e "$services/$unit" ]; then
            quietly systemctl disable --now "$unit"
        fi
        quietly rm -f "$services/$unit"
    done
    has_systemd && quietly systemctl daemon-reload
    if [ -e "$services/strata-coordinator.service" ] || [ -e "$services/strata-serve.service" ]; then
        say "$venv stays: another service of this machine has its program there"
    else
        quietly rm -rf "$venv"
    fi
    say "the hub is removed; $settings, $home and $backups stay"
}

is_root || die "run this as root: it makes a user and a service"
take_turn
if [ -n "$uninstall" ]; then
    remove
    exit 0
fi
check_words
for unit in strata-hub.service strata-hub-backup.service strata-hub-backup.timer; do
    check_unit "$units/$unit"
done
check_python
make_user "$user" "$home"
check_folders
make_folders
write_settings
install_package hub,postgres,notify "$pins"
write_units
start
