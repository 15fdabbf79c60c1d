//! Where guests run (on this host if its KVM is complete, else in a lab), and the files that they
//! need.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::program::not_run;

/// The environment variable that is set in a lab.
const INSIDE: &str = "TRANSOM_LAB";
/// The environment variable that takes a suite to another place: `intel`.
const CHOICE: &str = "TRANSOM_ON";
/// Bochs' names of the processors of the Intel lab: the one with most of VMX, and an older one that
/// only `TRANSOM_TESTS=all` uses. The tests without an extension of old ones run on the first.
const INTEL: [&str; 2] = ["corei7_skylake_x", "corei7_haswell_4770"];
/// Begins a line that says where the guests of a suite run, which `./test` lists at its end.
pub(crate) const RUNS_ON: &str = "guests run on: ";
const ON_AMD: &str = "AMD's extensions (lab)";
const ON_INTEL: &str = "Intel's extensions (lab)";
/// The exit status when the lab ended without one.
const NO_STATUS: u8 = 125;
const FORWARDED_VARIABLES: &[&str] = &["TRANSOM_TESTS", "VMM_LOG"];

pub struct Lab {
    /// Includes the memory of its guests.
    pub mib: u32,
    /// The time after which the lab is stopped.
    pub seconds: u32,
    /// Names of assets that `tests/lab/assets` fetches.
    pub assets: &'static [&'static str],
}

impl Lab {
    /// Chooses where the tests run. `None`: here, and the caller runs them. Otherwise they ran in
    /// a lab, and this is its status.
    pub fn enter(&self) -> anyhow::Result<Option<ExitCode>> {
        if inside() {
            return Ok(None);
        }
        if env::var_os(CHOICE).is_some_and(|place| place == "intel") {
            return self.enter_intel(&INTEL[..1]);
        }
        let Some(why) = lacks()? else {
            runs_on(&this_host());
            return Ok(None);
        };
        crate::say!("the lab is needed, because this host's KVM {why}");
        self.enter_amd(&[])
    }

    /// Runs the tests in a lab with USB devices, which no other host of tests has.
    pub fn enter_with_usb(&self) -> anyhow::Result<Option<ExitCode>> {
        if inside() {
            return Ok(None);
        }
        build()?;
        self.enter_amd(&["-u"])
    }

    fn enter_amd(&self, options: &[&str]) -> anyhow::Result<Option<ExitCode>> {
        runs_on(ON_AMD);
        let mut lab = self.command()?;
        lab.args(options);
        for (name, path) in assets(self.assets)? {
            lab.arg("-e").arg(format!("{name}={}", path.display()));
        }
        Ok(Some(ExitCode::from(run_tests(lab)?)))
    }

    /// Runs the tests in the Intel lab, on each processor until one fails.
    pub fn enter_each_intel(&self) -> anyhow::Result<Option<ExitCode>> {
        if inside() || everything() {
            return self.enter_intel(&INTEL);
        }
        not_run(&format!("all of it on Bochs' {}", INTEL[1]), THOROUGH);
        self.enter_intel(&INTEL[..1])
    }

    fn enter_intel(&self, models: &[&str]) -> anyhow::Result<Option<ExitCode>> {
        if inside() {
            return Ok(None);
        }
        build()?;
        runs_on(ON_INTEL);
        let mut code = 0;
        for model in models {
            crate::say!("the processor is Bochs' {model}");
            let mut lab = Command::new(repository().join("tests/lab/lab-intel"));
            lab.args(["-t", &self.limit().to_string(), "-M", model]);
            // The lab has no files of this machine but these.
            let load = hyperv_load()?.into();
            for path in [env::current_exe()?, vmm()?, load, repository().join("tests/lab")] {
                lab.arg("-a").arg(path);
            }
            for (name, path) in assets(self.assets)? {
                lab.arg("-a").arg(&path).arg("-e").arg(format!("{name}={}", path.display()));
            }
            lab.current_dir(repository()).stdin(Stdio::null());
            code = run_tests(lab)?;
            if code != 0 {
                break;
            }
        }
        Ok(Some(ExitCode::from(code)))
    }

    /// The command that runs `program` in a lab. `ports` of the lab are forwarded from this host's
    /// loopback.
    pub fn around(&self, program: &Command, ports: &[u16]) -> anyhow::Result<Command> {
        let mut lab = self.command()?;
        runs_on(ON_AMD);
        for port in ports {
            lab.args(["-p", &port.to_string()]);
        }
        lab.arg("--").arg(program.get_program()).args(program.get_args());
        Ok(lab)
    }

    /// The seconds that it may take. Tests that repeat something do so much more often with
    /// `TRANSOM_TESTS=all`.
    fn limit(&self) -> u32 {
        self.seconds * if everything() { 12 } else { 1 }
    }

    /// The command for a lab, up to the program that runs in it.
    fn command(&self) -> anyhow::Result<Command> {
        let folder = shared()?;
        std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let mut lab = Command::new(repository().join("tests/lab/lab"));
        lab.args(["-m", &self.mib.to_string(), "-t", &self.limit().to_string(), "-s"]);
        lab.arg(&folder).current_dir(repository()).stdin(Stdio::null());
        Ok(lab)
    }
}

/// Runs this suite again, in a lab, and returns its status.
fn run_tests(mut lab: Command) -> anyhow::Result<u8> {
    for name in FORWARDED_VARIABLES.iter().filter(|name| env::var_os(name).is_some()) {
        lab.args(["-e", name]);
    }
    lab.arg("--").arg(env::current_exe()?).args(env::args_os().skip(1));
    let status = lab.status().with_context(|| format!("{}", lab.get_program().display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(NO_STATUS))
}

fn runs_on(place: &str) {
    crate::say!("{RUNS_ON}{place}");
}

/// This host's own KVM: by the name of its module, which says whose extensions it uses.
pub(crate) fn this_host() -> String {
    let is_loaded = |name: &&str| Path::new("/sys/module").join(name).exists();
    let module = ["kvm_intel", "kvm_amd", "kvm_pvm"].into_iter().find(is_loaded);
    format!("this host's KVM ({})", module.unwrap_or("unknown"))
}

/// The reason why guests cannot run on this host, if they cannot. Builds the programs first.
pub fn lacks() -> anyhow::Result<Option<&'static str>> {
    build()?;
    Ok(match situation()?.as_str() {
        "full" => None,
        "paravirtual" => Some("only emulates kernels"),
        _ => Some("is missing"),
    })
}

pub fn inside() -> bool {
    env::var_os(INSIDE).is_some()
}

/// The reason of a test that runs only with `TRANSOM_TESTS=all`.
pub const THOROUGH: &str = "TRANSOM_TESTS is not all";

/// Whether to run all cases, and not only those that cover the rest.
pub fn everything() -> bool {
    env::var_os("TRANSOM_TESTS").is_some_and(|value| value == "all")
}

pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests is a folder of the repository")
}

/// The target folder of this test's profile.
fn profile() -> anyhow::Result<PathBuf> {
    let program = env::current_exe()?;
    let folder = program.parent().and_then(Path::parent);
    Ok(folder.with_context(|| format!("{}: in no profile", program.display()))?.to_owned())
}

/// A folder that is the same in the lab and outside, for files that are read later.
pub fn shared() -> anyhow::Result<PathBuf> {
    Ok(profile()?.join("guests"))
}

/// A folder for files of tests, like `CARGO_TARGET_TMPDIR`.
pub fn temporary() -> anyhow::Result<PathBuf> {
    Ok(profile()?.with_file_name("tmp"))
}

pub fn vmm() -> anyhow::Result<PathBuf> {
    program("vmm")
}

/// The program that keeps a Linux guest busy, for guests of any suite.
pub fn hyperv_load() -> anyhow::Result<String> {
    let path = program("hyperv_load")?.into_os_string();
    path.into_string().map_err(|path| anyhow::anyhow!("{path:?}: not UTF-8"))
}

fn program(name: &str) -> anyhow::Result<PathBuf> {
    let path = profile()?.join(name);
    ensure!(path.exists(), "{}: missing; build it with this profile", path.display());
    Ok(path)
}

/// Builds the programs with our profile. Outside of cargo, the existing ones are used.
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

/// This host's KVM, as `vmm doctor` reports it.
fn situation() -> anyhow::Result<String> {
    let output = Command::new(vmm()?).args(["doctor", "--json"]).output().context("vmm doctor")?;
    let found: Value = serde_json::from_slice(&output.stdout).context("vmm doctor --json")?;
    let situation = found["situation"].as_str().context("vmm doctor --json: no situation")?;
    Ok(situation.to_lowercase())
}

/// The path of an asset: passed into the lab, or fetched now by `tests/lab/assets`.
pub fn asset(name: &str) -> anyhow::Result<PathBuf> {
    if let Some(path) = env::var_os(name) {
        return Ok(path.into());
    }
    ensure!(!inside(), "{name}: this asset is not in the suite's list");
    let found = assets(&[name])?.pop();
    Ok(found.with_context(|| format!("{name}: no such asset"))?.1)
}

/// A program of an asset that is a tree of unpacked packages, with its own libraries.
pub fn unpacked(asset: &str, program: &str) -> anyhow::Result<Command> {
    let tree = self::asset(asset)?;
    let mut command = Command::new(tree.join("lib64/ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(tree.join("usr/lib/x86_64-linux-gnu"));
    command.arg(tree.join(program));
    Ok(command)
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
    /// unpacks them as `$1` and `$2`: dpkg and apt see them in this order.
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
[ "$(readlink "$cache/tree/bin")" = usr/bin ] || fail "/bin is not a link to usr/bin"
[ "$(readlink "$cache/tree/lib64")" = usr/lib64 ] || fail "/lib64 is not a link to usr/lib64"
[ "$(cat "$cache/tree/bin/one" "$cache/tree/bin/two")" = $'one\ntwo' ] || fail "a file is missing"
"#;

    #[test]
    fn packages_with_bin_as_directory_and_link_merge() {
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
