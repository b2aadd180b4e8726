#!/bin/sh
# clean_root.sh ROOT "SHARED ..." COMMAND...: run COMMAND in the folder ROOT as its whole file system. Programs and
# libraries of a base image are this machine's, read-only; so are the folders SHARED. Needs a mount namespace of its own:
# unshare --mount clean_root.sh ...
set -eu
root=$1 shared=$2
shift 2
for path in /usr /lib /lib64 /bin /sbin $shared; do
    if [ -L "$path" ]; then
        [ -e "$root$path" ] || cp -P "$path" "$root$path"
    elif [ -d "$path" ]; then
        mkdir -p "$root$path"
        mount --bind "$path" "$root$path"
        mount -o remount,bind,ro "$root$path"
    fi
done
for path in /dev /proc; do
    mkdir -p "$root$path"
    mount --rbind "$path" "$root$path"
done
mkdir -p "$root/tmp"
chmod 1777 "$root/tmp"
exec chroot "$root" "$@"
