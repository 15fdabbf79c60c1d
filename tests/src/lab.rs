//! Where guests run: on this host if its KVM is complete, else in the lab. And what they run.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

/// Set in the lab.
const INSIDE: &str = "TRANSOM_LAB";
/// The lab's status when there is none of what ran in it.
const NO_STATUS: u8 = 125;
/// What a test may be told from outside.
const TOLD: &[&str] = &["TRANSOM_TESTS", "VMM_LOG"];

/// What a suite needs of the lab.
pub struct Lab {
    /// Its memory. What the guests touch is taken from it.
    pub mib: u32,
    /// After so many seconds it is stopped.
    pub seconds: u32,
    /// What `tests/lab/assets` is to get: names of its list.
    pub assets: &'static [&'static str],
}

impl Lab {
    /// Says where the tests run. Nothing: here, and now. Else they have run in the lab.
    ///
    /// # Errors
    ///
    /// When the programs or the assets cannot be had, or no lab can be started.
    pub fn enter(&self) -> anyhow::Result<Option<ExitCode>> {
        if inside() {
            return Ok(None);
        }
        let Some(why) = lacks()? else {
            crate::say!("guests run on this host, which has full KVM");
            return Ok(None);
        };
        crate::say!("guests run in the lab, because this host's KVM {why}");
        let mut lab = self.command()?;
        for (name, path) in assets(self.assets)? {
            lab.arg("-e").arg(format!("{name}={}", path.display()));
        }
        for name in TOLD.iter().filter(|name| env::var_os(name).is_some()) {
            lab.args(["-e", name]);
        }
        lab.arg("--").arg(env::current_exe()?).args(env::args_os().skip(1));
        let status = lab.status().context("tests/lab/lab")?;
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(Some(ExitCode::from(code.unwrap_or(NO_STATUS))))
    }

    /// The command that runs this one where guests can run. These ports of it are this host's own,
    /// at its loopback.
    ///
    /// # Errors
    ///
    /// When there is no lab to be had.
    pub fn around(&self, program: &Command, ports: &[u16]) -> anyhow::Result<Command> {
        let mut lab = self.command()?;
        for port in ports {
            lab.args(["-p", &port.to_string()]);
        }
        lab.arg("--").arg(program.get_program()).args(program.get_args());
        Ok(lab)
    }

    /// A lab, up to what depends on what runs in it.
    fn command(&self) -> anyhow::Result<Command> {
        let folder = shared()?;
        std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let mut lab = Command::new(repository().join("tests/lab/lab"));
        lab.args(["-m", &self.mib.to_string(), "-t", &self.seconds.to_string(), "-s"]);
        lab.arg(&folder).current_dir(repository()).stdin(Stdio::null());
        Ok(lab)
    }
}

/// Why guests cannot run on this host itself, if they cannot. The program is built by then.
///
/// # Errors
///
/// When it cannot be built.
pub fn lacks() -> anyhow::Result<Option<&'static str>> {
    build()?;
    Ok(match situation()?.as_str() {
        "full" => None,
        "paravirtual" => Some("only emulates kernels"),
        _ => Some("is missing"),
    })
}

/// Whether this process is in the lab.
pub fn inside() -> bool {
    env::var_os(INSIDE).is_some()
}

/// Whether everything is to be tried, and not only what covers the rest.
pub fn everything() -> bool {
    env::var_os("TRANSOM_TESTS").is_some_and(|value| value == "all")
}

/// The top of the repository.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests is a folder of the repository")
}

/// The folder of the profile that this test was built with.
fn profile() -> anyhow::Result<PathBuf> {
    let program = env::current_exe()?;
    let folder = program.parent().and_then(Path::parent);
    Ok(folder.with_context(|| format!("{}: in no profile", program.display()))?.to_owned())
}

/// A folder that is the same in the lab and outside, for what is to be read afterwards.
///
/// # Errors
///
/// When this program is not where cargo puts it.
pub fn shared() -> anyhow::Result<PathBuf> {
    Ok(profile()?.join("guests"))
}

/// The `vmm` that is tested.
///
/// # Errors
///
/// When it was not built.
pub fn vmm() -> anyhow::Result<PathBuf> {
    let path = profile()?.join("vmm");
    ensure!(path.exists(), "{}: not there; build it with this profile", path.display());
    Ok(path)
}

/// Builds it with our profile. Without cargo around us, what was built before is taken.
fn build() -> anyhow::Result<()> {
    if env::var_os("CARGO").is_none() {
        return Ok(());
    }
    let folder = profile()?;
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        Some(name) => name,
        None => bail!("{}: in no profile", folder.display()),
    };
    let status = crate::program::build(profile).status().context("cargo build")?;
    ensure!(status.success(), "cargo build --bins --profile {profile}: {status}");
    Ok(())
}

/// What `vmm doctor` says of this host.
fn situation() -> anyhow::Result<String> {
    let output = Command::new(vmm()?).args(["doctor", "--json"]).output().context("vmm doctor")?;
    let found: Value = serde_json::from_slice(&output.stdout).context("vmm doctor --json")?;
    let situation = found["situation"].as_str().context("vmm doctor --json: no situation")?;
    Ok(situation.to_lowercase())
}

/// The path of an asset: what the lab was entered with, or what `tests/lab/assets` gets now.
///
/// # Errors
///
/// When there is none of that name, or it cannot be had.
pub fn asset(name: &str) -> anyhow::Result<PathBuf> {
    if let Some(path) = env::var_os(name) {
        return Ok(path.into());
    }
    ensure!(!inside(), "{name}: the suite does not name this asset");
    let found = assets(&[name])?.pop();
    Ok(found.with_context(|| format!("{name}: no such asset"))?.1)
}

fn assets(names: &[&str]) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut command = Command::new(repository().join("tests/lab/assets"));
    let output = command.args(names).stderr(Stdio::inherit()).output();
    let output = output.context("tests/lab/assets")?;
    ensure!(output.status.success(), "tests/lab/assets {}: {}", names.join(" "), output.status);
    let lines = String::from_utf8(output.stdout).context("tests/lab/assets")?;
    let pairs = lines.lines().filter_map(|line| line.split_once('='));
    Ok(pairs.map(|(name, path)| (name.to_owned(), path.into())).collect())
}

#[cfg(test)]
mod test {
    use super::*;

    /// Makes two packages, `dirs` with a directory `/bin` and `links` with a link in its place, and
    /// unpacks them as `$1` and `$2`, which dpkg and apt then see in this order.
    const PACKAGES: &str = r#"
set -euo pipefail
here=$PWD/tests/lab first=$1 second=$2 TRANSOM_CACHE=$3
fail() { echo "fail: $*" >&2; exit 1; }
. "$here/debian.sh"
mkdir -p "$cache/apt/suite" "$cache/debs" "$cache"/{dirs,links}/DEBIAN
for name in dirs links; do
  printf '%s\n' "Package: $name" 'Version: 1' 'Architecture: all' 'Maintainer: x <x@x>' \
    'Description: x' > "$cache/$name/DEBIAN/control"
done
mkdir -p "$cache"/dirs/{bin,lib} "$cache"/links/usr/{bin,lib}
echo one > "$cache/dirs/bin/one"
echo two > "$cache/links/usr/bin/two"
ln -s usr/bin "$cache/links/bin"
ln -s usr/lib "$cache/links/lib"
dpkg-deb --build "$cache/$first" "$cache/debs/1.deb" > /dev/null
dpkg-deb --build "$cache/$second" "$cache/debs/2.deb" > /dev/null
open_suite() { :; }
apt_of() {
  case $3 in
    -s) printf 'Inst dirs\nInst links\n' ;;
    download) cp "$cache"/debs/*.deb . ;;
  esac
}
unpack_tree suite "$cache/tree" dirs links
[ "$(readlink "$cache/tree/bin")" = usr/bin ] || fail "/bin is no link to usr/bin"
[ "$(readlink "$cache/tree/lib64")" = usr/lib64 ] || fail "/lib64 is no link to usr/lib64"
[ "$(cat "$cache/tree/bin/one" "$cache/tree/bin/two")" = $'one\ntwo' ] || fail "a file is missing"
"#;

    #[test]
    fn packages_with_bin_as_a_directory_and_as_a_link_make_one_tree() {
        for [first, second] in [["dirs", "links"], ["links", "dirs"]] {
            let folder = tempfile::tempdir().unwrap();
            let mut bash = Command::new("bash");
            bash.args(["-c", PACKAGES, "bash", first, second]).arg(folder.path());
            let output = bash.current_dir(repository()).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{first}, then {second}: {error}");
        }
    }
}
