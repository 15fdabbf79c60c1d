# shellcheck shell=bash disable=SC2154
# Packages of one Debian suite, fetched and unpacked into the cache, without root and without touching the
# machine's own package state. Sourced by `lab` and `assets`, which set `here` (the folder
# of this file) and define `fail`.
#
# The suite may be another than the machine's: apt gets a state of its own whose sources are those that this
# machine has for Debian, with the name of the suite replaced. So a mirror, a proxy or a credential that is
# configured here is used there. Signatures are checked against the installed debian-archive-keyring.

# A failure inside $(…) is a failure.
shopt -s inherit_errexit

# Where everything is kept.
cache=${TRANSOM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/transom}

# locked NAME COMMAND…: runs COMMAND while no other process is inside NAME.
locked() {
  mkdir -p "$cache/lock"
  (
    exec 9> "$cache/lock/$1"
    flock 9
    "${@:2}"
  )
}

# kept FOLDER COMMAND…: FOLDER is there, if need be after COMMAND has made it; what nobody used for two
# weeks beside it goes. The name of FOLDER carries the stamp of its recipe.
kept() {
  [ -e "$1" ] || locked "$(basename "$1")" make_kept "$@"
  touch "$1"
}

make_kept() {
  [ ! -e "$1" ] || return 0
  mkdir -p "$(dirname "$1")"
  find "$(dirname "$1")" -mindepth 1 -maxdepth 1 -mtime +14 -exec rm -rf {} +
  "${@:2}"
}

# stamp FILE…: a short word that changes when one of our files does.
stamp() {
  cat "$@" | sha256sum | cut -c 1-16
}

# needs COMMAND=PACKAGE…: installs the packages whose commands are missing, or says which.
needs() {
  local pair missing=()
  for pair; do
    command -v "${pair%%=*}" > /dev/null || missing+=("${pair#*=}")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || fail "please install these Debian packages: ${missing[*]}"
  locked install install_packages "${missing[@]}"
}

install_packages() {
  local log=$cache/install.log apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y
    -o DPkg::Lock::Timeout=600 --no-install-recommends)
  echo "installing Debian packages: $*" >&2
  "${apt[@]}" install "$@" > "$log" 2>&1 && return
  "${apt[@]}" update >> "$log" 2>&1 || mirror_is_away "$log"
  "${apt[@]}" install "$@" >> "$log" 2>&1 || mirror_is_away "$log"
}

mirror_is_away() {
  grep -E '^(E|W|Err)' "$1" | tail -4 >&2
  fail "Debian's packages cannot be fetched from the sources of this machine (log: $1)"
}

# The machine's sources, one per line: URI SUITE COMPONENT…
machine_sources() {
  local list
  for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ ! -f "$list" ] || sed -nE 's/^deb[[:space:]]+(\[[^]]*\][[:space:]]*)?//p' "$list"
  done
  for list in /etc/apt/sources.list.d/*.sources; do
    [ ! -f "$list" ] || awk -v RS= '
      {
        split("", field)
        n = split($0, line, "\n")
        for (i = 1; i <= n; i++) {
          if (line[i] ~ /^#/) continue
          if (match(line[i], /^[A-Za-z-]+:/)) name = tolower(substr(line[i], 1, RLENGTH - 1))
          sub(/^[A-Za-z-]+:/, "", line[i])
          field[name] = field[name] " " line[i]
        }
        if (field["types"] !~ /(^| )deb( |$)/ || field["enabled"] ~ /no/) next
        uris = split(field["uris"], uri, " ")
        suites = split(field["suites"], suite, " ")
        for (u = 1; u <= uris; u++)
          for (s = 1; s <= suites; s++) print uri[u], suite[s], field["components"]
      }' "$list"
  done
}

# suite_sources SUITE: the same for another suite: only Debian's own archive, main, and its security fixes.
suite_sources() {
  local own keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  own=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
  [ -r "$keyring" ] || fail "please install the Debian package debian-archive-keyring"
  machine_sources | awk -v own="$own" -v suite="$1" -v keyring="$keyring" '
    $1 !~ /debian(-security)?(\.list)?(\/[0-9TZ]+)?\/?$/ || !/ main( |$)/ { next }
    $2 == own || $2 ~ /^(old)*stable$/ { name = suite }
    $2 == own "-security" || $2 ~ /^(old)*stable-security$/ { name = suite "-security" }
    name { print "deb [signed-by=" keyring "] " $1 " " name " main"; name = "" }' | sort -u
}

# apt_of SUITE COMMAND…: apt-get or apt-cache with the state of SUITE.
apt_of() {
  local state=$cache/apt/$1 command=$2
  shift 2
  "$command" -q -o Dir::State="$state" -o Dir::State::status="$state/status" -o Dir::Cache="$state/cache" \
    -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o APT::Sandbox::User= \
    -o APT::Install-Recommends=false -o Acquire::Languages=none -o Acquire::Retries=2 "$@"
}

# open_suite SUITE: reads its lists; those read within the last hour are used again.
open_suite() {
  locked "apt-$1" read_lists "$1"
}

read_lists() {
  local state=$cache/apt/$1
  [ -z "$(find "$state/fresh" -mmin -60 2> /dev/null)" ] || return 0
  mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
  : > "$state/status"
  suite_sources "$1" > "$state/sources.list"
  [ -s "$state/sources.list" ] || fail "no source of Debian's own archive in /etc/apt, from which to get $1"
  apt_of "$1" apt-get update > "$state/log" 2>&1 || mirror_is_away "$state/log"
  # apt only warns when a list is missing, so ask for what cannot be missing.
  apt_of "$1" apt-cache show busybox-static > /dev/null 2>&1 || mirror_is_away "$state/log"
  touch "$state/fresh"
}

# unpack SUITE FOLDER PACKAGE…: unpacks into FOLDER, without installing and without dependencies.
unpack() {
  local suite=$1 folder=$2 archives archive
  shift 2
  archives=$folder.archives
  rm -rf "$folder" "$archives"
  mkdir -p "$folder" "$archives"
  (cd "$archives" && apt_of "$suite" apt-get download "$@") > "$cache/apt/$suite/log" 2>&1 ||
    mirror_is_away "$cache/apt/$suite/log"
  for archive in "$archives"/*.deb; do
    dpkg-deb -x "$archive" "$folder"
  done
  rm -rf "$archives"
}

unpack_package() {
  open_suite "$1"
  unpack "$1" "$3.new" "$2"
  mv "$3.new" "$3"
}

# unpack_tree SUITE FOLDER PACKAGE…: with everything that they depend on.
unpack_tree() {
  local packages name
  open_suite "$1"
  packages=$(apt_of "$1" apt-get -s install "${@:3}" 2> "$cache/apt/$1/log" | awk '$1 == "Inst" { print $2 }')
  [ -n "$packages" ] || fail "Debian's $1 does not have all of ${*:3}"
  # shellcheck disable=SC2086  # a list
  unpack "$1" "$2.new" $packages
  rm -rf "$2.new"/usr/share/{doc,man,locale,info,lintian,bug} "$2.new"/usr/lib/x86_64-linux-gnu/gconv
  mkdir -p "$2.new"/{proc,sys,dev,tmp,run}
  for name in bin sbin lib lib64; do
    merge "$2.new" "$name"
  done
  mv "$2.new" "$2"
}

# merge ROOT NAME: /NAME is a link to /usr/NAME, as the package base-files has it.
merge() {
  mkdir -p "$1/usr/$2"
  if [ -d "$1/$2" ]; then
    cp -a "$1/$2/." "$1/usr/$2/"
    rm -rf "${1:?}/$2"
  fi
  ln -s "usr/$2" "$1/$2"
}

# package SUITE PACKAGE: says the folder where it is unpacked alone, and gets it first if it is not there.
package() {
  local folder
  folder=$cache/package/$1-$2-$(stamp "$here/debian.sh")
  kept "$folder" unpack_package "$1" "$2" "$folder"
  echo "$folder"
}

# tree SUITE PACKAGE…: the same with all that they depend on: a root to run them in.
tree() {
  local folder words=${*:2}
  folder=$cache/tree/$1-${words// /+}-$(stamp "$here/debian.sh")
  kept "$folder" unpack_tree "$1" "$folder" "${@:2}"
  echo "$folder"
}

# image_of TREE: a file system image of it, for a guest to chroot into.
image_of() {
  local image
  image=$cache/image/$(basename "$1").ext4
  kept "$image" build_image "$1" "$image"
  echo "$image"
}

build_image() {
  local kib
  needs mke2fs=e2fsprogs
  kib=$(du -sk "$1" | cut -f 1)
  PATH=$PATH:/usr/sbin mke2fs -q -t ext4 -O ^has_journal -d "$1" "$2.new" "$((kib * 5 / 4 + 8192))k" > /dev/null
  mv "$2.new" "$2"
}

# kernel_of SUITE FLAVOUR: the package that today's linux-image-FLAVOUR stands for.
kernel_of() {
  apt_of "$1" apt-cache depends "linux-image-$2" | awk '/Depends: linux-image-[0-9]/ { print $2; exit }'
}

# unpack_kernel SUITE FLAVOUR FOLDER: bzImage, vmlinux, version and lib/modules in FOLDER.
unpack_kernel() {
  local package version new=$3.new
  open_suite "$1"
  package=$(kernel_of "$1" "$2")
  [ -n "$package" ] || fail "Debian's $1 has no kernel linux-image-$2"
  version=${package#linux-image-}
  unpack "$1" "$new" "$package"
  [ -e "$new/lib" ] || ln -s usr/lib "$new/lib"
  mv "$new/boot/vmlinuz-$version" "$new/bzImage"
  rm -rf "${new:?}/boot" "${new:?}/usr/share"
  depmod -b "$new" "$version"
  echo "$version" > "$new/version"
  "$here/vmlinux" "$new/bzImage" "$new/vmlinux"
  mv "$new" "$3"
}

# kernel SUITE FLAVOUR: says the folder where that kernel is, and gets it first if it is not there.
kernel() {
  local folder
  folder=$cache/kernel/$1-$2-$(stamp "$here/debian.sh" "$here/vmlinux")
  kept "$folder" unpack_kernel "$1" "$2" "$folder"
  echo "$folder"
}
