#!/usr/bin/env bash
# Starts systemd as PID 1 of a root of its own: namespaces, and an overlay over this machine's root whose changes are
# held in memory. Nothing of the machine is changed but a cgroup, which the caller removes.
#
#   systemd_root.sh outside WORK CGROUP [BASE SITE OURS]     makes the cgroup, and enters the namespaces
#   systemd_root.sh inside WORK [BASE SITE OURS]             makes the root, and becomes systemd
#
# BASE holds the interpreter, SITE the packages and OURS the three of this project. The root has them below
# /opt/edge-kubelet as an installation would: the services see neither /tmp nor /root. Without them, it has what the
# machine has.
set -euo pipefail

# The hierarchies that systemd uses: of cgroups v1 each controller has its own, cgroups v2 has one for all.
hierarchies() {
  grep -E '^[0-9]+:(name=systemd|memory|pids|devices|cpu.*)?:' /proc/self/cgroup | grep -v :cpuset:
}

outside() {
  local work=$1 name=$2 controllers path mount found
  found=$(hierarchies)
  while IFS=: read -r _ controllers path; do
    if [ -n "$controllers" ]; then
      mount=/sys/fs/cgroup/${controllers#name=}$path
    else
      # At the top: a cgroup with processes cannot give controllers to those below it.
      mount=$(findmnt --noheadings --first-only --types cgroup2 --output TARGET)
    fi
    mkdir -p "$mount/$name"
    echo $$ >"$mount/$name/cgroup.procs"
    echo "$mount/$name" >>"$work/cgroups"
  done <<<"$found"
  exec unshare --mount --pid --uts --ipc --net --cgroup --fork --kill-child \
    bash "$0" inside "$work" "${@:3}"
}

mount_cgroups() {
  local controllers directory
  if hierarchies | grep -q '^[0-9]*:[a-z]'; then
    mount -t tmpfs tmpfs "$1"
  fi
  while IFS=: read -r _ controllers _; do
    directory=$1/${controllers#name=}
    if [ -n "$controllers" ]; then
      mkdir "$directory" && mount -t cgroup -o "$controllers" cgroup "$directory"
    elif mountpoint -q "$1" && [ "$(stat -f -c %T "$1")" = tmpfs ]; then
      mkdir "$1/unified" && mount -t cgroup2 cgroup2 "$1/unified"
    else
      mount -t cgroup2 cgroup2 "$1"
    fi
  done < <(hierarchies)
}

inside() {
  local work=$1 root=$1/root
  mount --make-rprivate /
  mount -t tmpfs -o mode=0755 tmpfs "$work"
  mkdir "$work"/{upper,work,root}
  mount -t overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" overlay "$root"
  if [ $# -gt 1 ]; then
    install_programs "$work" "$root" "${@:2}"
  fi
  mount_kernel "$root"
  # Nothing of this machine's own is started: neither what is enabled, nor its timers.
  printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n' \
    >"$root/etc/systemd/system/edge-test.target"
  ln -s /dev/null "$root/etc/systemd/system/timers.target"
  ip link set lo up
  mkdir "$root/run/old"
  cd "$root"
  pivot_root . run/old
  umount -l /run/old
  exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --unit=edge-test.target --show-status=no
}

# An environment as `python -m venv` makes it, over what is installed here.
install_programs() {
  local work=$1 root=$2 to=$2/opt/edge-kubelet base=$3 site=$4 ours=$5 python program package
  python=$(basename "$(dirname "$site")")
  mkdir -p "$to"/{base,bin} "$to/lib/$python/site-packages" "$work"/{site,site-work}
  mount --bind "$base" "$to/base"
  mount -t overlay -o "lowerdir=$site,upperdir=$work/site,workdir=$work/site-work" overlay "$to/lib/$python/site-packages"
  for package in schemas kubelet relay; do
    mkdir -p "$to/lib/$python/site-packages/$package"
    mount --bind "$ours/$package" "$to/lib/$python/site-packages/$package"
  done
  # In a checkout, the packages' units are links to this directory.
  if [ -L "$ours/kubelet/units" ]; then
    mkdir -p "$to/lib/$python/site-packages/systemd"
    mount --bind "$ours/systemd" "$to/lib/$python/site-packages/systemd"
  fi
  # The broker of the extra, which is found by the record of its package.
  touch "$to/bin/nats-server" && mount --bind "$site/../../../bin/nats-server" "$to/bin/nats-server"
  echo "home = /opt/edge-kubelet/base/bin" >"$to/pyvenv.cfg"
  ln -s ../base/bin/python3 "$to/bin/python3"
  for program in kubelet.cli.entry relay.cli.entry; do
    printf '#!/opt/edge-kubelet/bin/python3\nfrom %s import main\nmain()\n' "$program" >"$to/bin/${program%%.*}"
    chmod 0755 "$to/bin/${program%%.*}"
    ln -s "${program%%.*}" "$to/bin/edge-${program%%.*}"
  done
  # An interpreter outside of /usr finds its library by a path that the services do not see.
  mkdir -p "$root/etc/systemd/system/service.d"
  printf '[Service]\nEnvironment=LD_LIBRARY_PATH=/opt/edge-kubelet/base/lib\n' \
    >"$root/etc/systemd/system/service.d/interpreter.conf"
}

mount_kernel() {
  local root=$1 device directory
  mount -t proc proc "$root/proc"
  mount -t sysfs sysfs "$root/sys"
  mount_cgroups "$root/sys/fs/cgroup"
  mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
  for device in null zero full random urandom tty; do
    touch "$root/dev/$device" && mount --bind "/dev/$device" "$root/dev/$device"
  done
  mkdir "$root"/dev/{pts,shm}
  mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
  mount -t tmpfs tmpfs "$root/dev/shm"
  ln -s pts/ptmx "$root/dev/ptmx"
  ln -s /proc/self/fd "$root/dev/fd"
  for directory in run tmp; do mount -t tmpfs tmpfs "$root/$directory"; done
}

"$@"
