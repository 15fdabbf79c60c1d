# shellcheck shell=bash
# Installs what a build needs on this machine. Sourced by `try`, `test` and `deploy/image`.

# fail SENTENCE: prints it and ends with status 1.
fail() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# step SENTENCE: prints the heading of a step.
step() {
  printf '\n== %s (%d s)\n' "$*" "$SECONDS"
}

# need PACKAGE…: installs the Debian packages that are missing, or fails with their names if it may not.
need() {
  local package missing=()
  command -v dpkg-query > /dev/null || {
    echo "not a Debian system: assuming that these packages are installed: $*" >&2
    return 0
  }
  for package; do
    dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q ' installed$' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || fail "packages are missing. Please run: sudo apt-get install ${missing[*]}"
  echo "installing Debian packages: ${missing[*]}"
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600)
  # The package lists of a fresh machine are empty or old; they are updated only if the installation fails.
  "${apt[@]}" install --no-install-recommends "${missing[@]}" > /dev/null 2>&1 ||
    { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends "${missing[@]}"; } > /dev/null ||
    fail "these packages cannot be installed: ${missing[*]}"
}

# need_rust COMPONENT…: checks for cargo of the version in Cargo.toml, with these components.
need_rust() {
  local wanted found component
  # rustup's folder, for a shell that has not read its profile.
  export PATH="$PATH:${CARGO_HOME:-${HOME-}/.cargo}/bin"
  wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  command -v cargo > /dev/null ||
    fail "cargo is missing. Debian's is too old; please install Rust $wanted or newer with rustup"
  found=$(rustc --version | cut -d ' ' -f 2)
  [ "$(printf '%s\n' "$wanted" "$found" | sort -V | head -n 1)" = "$wanted" ] ||
    fail "Rust $found is too old. Please run: rustup update stable ($wanted or newer is needed)"
  for component; do
    cargo "$component" --version > /dev/null 2>&1 ||
      fail "cargo $component is missing. Please run: rustup component add clippy rustfmt"
  done
}

# need_npm: npm fetches noVNC for the viewer. It is Debian's package, unless Node.js came with its own.
need_npm() {
  command -v npm > /dev/null || need npm
}

# full_kvm: whether this host's KVM runs complete operating systems. A paravirtual KVM lacks these flags.
full_kvm() {
  [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo
}
