#!/usr/bin/env bash
# Boots this machine's own systemd in a root of its own: /usr from here, read-only; the rest made anew, in memory.
#
# Called by machine.py as root in a mount namespace of its own. All that it makes lives in namespaces and in one control
# group, and ends with the process, which becomes the namespaces' init.
#
#   boot.sh ROOT CGROUP CHECKOUT UNIT_DIR
set -euo pipefail
root=$1 cgroup=$2 checkout=$3 unit_dir=$4
interpreter=$(cd "$checkout" && .venv/bin/python -I -c 'import sys; print(sys.base_prefix)')

mount -t tmpfs -o mode=755 machine "$root"
cd "$root"
mkdir -p usr etc/systemd/system proc sys dev run tmp var opt/checkout root home
chmod 1777 tmp

bind_read_only() { # SOURCE TARGET
  mkdir -p "./$2"
  mount --bind "$1" "./$2"
  mount -o remount,bind,ro "./$2"
}

bind_read_only /usr usr
for name in bin sbin lib lib32 lib64 libx32; do
  if [ -L "/$name" ]; then cp -P "/$name" "$name"; elif [ -d "/$name" ]; then bind_read_only "/$name" "$name"; fi
done
bind_read_only "$checkout" opt/checkout
case $interpreter in /usr | /usr/*) ;; *) bind_read_only "$interpreter" "$interpreter" ;; esac

cp -rP /etc/ld.so.cache /etc/ld.so.conf /etc/ld.so.conf.d /etc/alternatives etc/
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n' >etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' >etc/group
printf 'passwd: files\ngroup: files\nshadow: files\nhosts: files\n' >etc/nsswitch.conf
printf '0123456789abcdef0123456789abcdef\n' >etc/machine-id
printf 'LANG=C.UTF-8\n' >etc/locale.conf
printf '127.0.0.1 localhost\n' >etc/hosts
cp -r "$unit_dir/." etc/systemd/system/
# What would reach past the namespaces, into the kernel that everybody shares.
for unit in systemd-sysctl.service systemd-modules-load.service kmod-static-nodes.service systemd-journald-audit.socket \
  systemd-binfmt.service modprobe@.service proc-sys-fs-binfmt_misc.automount sys-kernel-debug.mount \
  sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount dev-hugepages.mount; do
  ln -sf /dev/null "etc/systemd/system/$unit"
done

mount -t tmpfs -o mode=755 dev dev
for name in null zero full random urandom tty; do
  touch "dev/$name"
  mount --bind "/dev/$name" "dev/$name"
done
ln -s /proc/self/fd dev/fd
mkdir dev/pts dev/shm
mount -t tmpfs shm dev/shm
mount -t tmpfs -o mode=755 run run

# A control group of its own, so that what systemd makes below it can be removed, whatever the host's layout is.
mkdir -p run/cgroup
mount -t cgroup2 cgroup2 run/cgroup
mkdir "run/cgroup/$cgroup"
echo $$ >"run/cgroup/$cgroup/cgroup.procs"

# shellcheck disable=SC2016
exec unshare --cgroup --pid --mount --net --uts --ipc --fork --kill-child bash -c '
  set -euo pipefail
  umount run/cgroup
  hostname machine
  mount -t proc proc proc
  mount --bind proc/sys proc/sys
  mount -o remount,bind,ro proc/sys
  mount -t sysfs -o ro sysfs sys
  mount -t cgroup2 cgroup2 sys/fs/cgroup
  mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
  ln -s pts/ptmx dev/ptmx
  mkdir run/host
  pivot_root . run/host
  cd /
  umount -l /run/host
  exec env -i container=lxc PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    setpriv --bounding-set=-sys_module,-sys_time,-sys_rawio,-syslog,-audit_control,-mac_admin,-mac_override \
    /lib/systemd/systemd --unit=basic.target \
    --log-target=journal --show-status=false
' </dev/null
