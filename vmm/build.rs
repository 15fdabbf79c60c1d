//! Compiles the probe, the guest program of tests/guest/probe, for `src/probe.rs` to embed,
//! collects what the devices' sources say of their configuration, for `src/reference.rs` to print,
//! and packs the browser viewer of `web`, for `src/web/files.rs` to serve.
//!
//! The probe is freestanding code for the processor at hand, so that the compiler that builds the
//! rest will do: no target has to be installed.
#[path = "build/font.rs"]
mod font;

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;

/// Relative to this package.
const SOURCES: &str = "../tests/guest/probe";

const FLAGS: [&str; 11] = [
    "--edition=2024",
    "--crate-name=probe",
    "--crate-type=bin",
    // Ring 3 of the guest starts as a process does, SSE2 included; nothing is relocated or unwound.
    "--target=x86_64-unknown-linux-gnu",
    "-Cpanic=abort",
    "-Crelocation-model=static",
    "-Copt-level=s",
    "-Ccodegen-units=1",
    "-Clto=fat",
    "-Cstrip=symbols",
    "-Dwarnings",
];

const LINK: [&str; 6] = [
    "-nostartfiles",
    "-nostdlib",
    "-static",
    "-no-pie",
    "-Wl,--build-id=none",
    "-Wl,--gc-sections",
];

fn main() -> ExitCode {
    match embed_probe().and_then(|()| collect_fields()).and_then(|()| embed_viewer()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn embed_probe() -> Result<()> {
    let package = PathBuf::from(env::var("CARGO_MANIFEST_DIR").context("not started by cargo")?);
    let sources = package.join(SOURCES);
    rerun_for_changes(&sources)?;
    let out = PathBuf::from(env::var("OUT_DIR").context("not started by cargo")?);
    font::write(&out)?;
    compile(&sources, &out.join("probe.elf"))
}

/// The folder tells of files added and removed, each file of a change to it.
fn rerun_for_changes(sources: &Path) -> Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/font.rs");
    println!("cargo::rerun-if-changed={}", sources.display());
    let files = fs::read_dir(sources).with_context(|| format!("reading {}", sources.display()))?;
    for file in files {
        println!("cargo::rerun-if-changed={}", file?.path().display());
    }
    Ok(())
}

fn compile(sources: &Path, image: &Path) -> Result<()> {
    let rustc = env::var_os("RUSTC").context("cargo names no compiler")?;
    let script = sources.join("link.ld");
    let mut command = Command::new(&rustc);
    command.args(FLAGS).args(LINK.map(|argument| format!("-Clink-arg={argument}")));
    command.arg(format!("-Clink-arg=-Wl,-T,{}", script.display()));
    // Paths show in panic messages; the image is the same wherever it is built.
    command.arg(format!("--remap-path-prefix={}=probe", sources.display()));
    command.arg("-o").arg(image).arg(sources.join("main.rs"));
    // Flags for the host's programs (sanitizers, coverage) mean nothing to a guest.
    command.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS");
    let status =
        command.status().with_context(|| format!("starting {} for the probe", rustc.display()))?;
    ensure!(status.success(), "the probe ({}) does not compile: {status}", sources.display());
    Ok(())
}

/// Relative to this package.
const DEVICES: &str = "../devices/src";

/// One line of the registry: `"edu" Edu: crate::pci::edu::Config,`.
fn registered(line: &str) -> Option<(&str, &str)> {
    let (kind, rest) = line.trim().strip_prefix('"')?.split_once('"')?;
    let path = rest.split_once(": crate::")?.1.strip_suffix("::Config,")?;
    Some((kind, path))
}

/// Writes `fields.rs`: for each kind of device, what its `Config` and that one's fields are for.
fn collect_fields() -> Result<()> {
    let package = PathBuf::from(env::var("CARGO_MANIFEST_DIR").context("not started by cargo")?);
    let devices = package.join(DEVICES);
    println!("cargo::rerun-if-changed={}", devices.display());
    let registry = fs::read_to_string(devices.join("registry.rs")).context("registry.rs")?;
    let mut list = String::from("&[\n");
    let mut count = 0;
    for (kind, path) in registry.lines().filter_map(registered) {
        let source = module(&devices, path)?;
        let (text, mut fields) = config(&source).with_context(|| path.to_owned())?;
        if let Some(shared) = wrapped(&source) {
            fields = config(&module(&devices, shared)?).with_context(|| shared.to_owned())?.1;
        }
        writeln!(list, "    ({kind:?}, {text:?}, &{fields:?}),")?;
        count += 1;
    }
    ensure!(count > 0, "no devices in registry.rs");
    list.push(']');
    let out = PathBuf::from(env::var("OUT_DIR").context("not started by cargo")?);
    fs::write(out.join("fields.rs"), list).context("fields.rs")
}

/// The source of a module.
fn module(devices: &Path, path: &str) -> Result<String> {
    let file = devices.join(path.replace("::", "/"));
    let mut places = [file.with_extension("rs"), file.join("config.rs"), file.join("mod.rs")];
    let place = places.iter_mut().find(|place| place.exists());
    let place = place.with_context(|| format!("{}: no such module", file.display()))?;
    fs::read_to_string(&*place).with_context(|| place.display().to_string())
}

/// The module whose `Config` this one is under another name.
fn wrapped(source: &str) -> Option<&str> {
    let line =
        source.lines().find_map(|line| line.strip_prefix("pub struct Config(pub crate::"))?;
    line.strip_suffix("::Config);")
}

type Field = (String, String, String);

/// The comment on `Config`, and name, type and comment of its fields. The sources are formatted,
/// so that lines are what they seem.
fn config(source: &str) -> Result<(String, Vec<Field>)> {
    let mut fields = Vec::new();
    let mut comment = String::new();
    let (mut own, mut dashes) = (None, false);
    for line in source.lines().map(str::trim) {
        dashes |= own.is_none() && line.contains("rename_all = \"kebab-case\"");
        if let Some(text) = line.strip_prefix("///") {
            comment.push_str(text);
        } else if line.starts_with("pub struct Config") {
            own = Some(std::mem::take(&mut comment));
            if line.ends_with(['}', ';']) {
                break;
            }
        } else if own.is_some() && line == "}" {
            break;
        } else if let (true, Some(field)) = (own.is_some(), line.strip_prefix("pub ")) {
            let (name, kind) = field.trim_end_matches(',').split_once(": ").context("a field")?;
            let text = std::mem::take(&mut comment).trim().to_owned();
            let name = if dashes { name.replace('_', "-") } else { name.to_owned() };
            fields.push((name, kind.to_owned(), text));
        } else if !line.starts_with("#[") {
            comment.clear();
            dashes &= own.is_some();
        }
    }
    let own = own.context("no `pub struct Config`")?;
    Ok((own.trim().to_owned(), fields))
}

/// Relative to this package: our page, and which noVNC goes with it.
const VIEWER: &str = "web";
/// What a browser needs of noVNC, and who made it.
const NOVNC: [&str; 5] = ["core", "vendor", "AUTHORS", "LICENSE.txt", "docs/LICENSE.MPL-2.0"];

/// Writes `viewer.rs`: the files of the browser viewer, compressed, and where browsers find them.
fn embed_viewer() -> Result<()> {
    let package = PathBuf::from(env::var("CARGO_MANIFEST_DIR").context("not started by cargo")?);
    let sources = package.join(VIEWER);
    rerun_for_changes(&sources)?;
    rerun_for_changes(&sources.join("page"))?;
    let out = PathBuf::from(env::var("OUT_DIR").context("not started by cargo")?).join(VIEWER);
    let novnc = install(&sources, &out)?;
    let mut files = Vec::new();
    gather(&sources.join("page"), "", &mut files)?;
    for part in NOVNC {
        gather(&novnc.join(part), &format!("novnc/{part}"), &mut files)?;
    }
    files.sort();
    // Other files are found elsewhere, so that browsers may keep these for ever.
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    let place = format!("files/{:016x}", hasher.finish());
    let mut list = format!("const PLACE: &str = {place:?};\nconst FILES: &[(&str, &[u8])] = &[\n");
    let preload: Vec<_> = modules(&files, "viewer.js")?
        .into_iter()
        .map(|name| format!("<link rel=\"modulepreload\" href=\"{place}/{name}\">"))
        .collect();
    for (number, (name, bytes)) in files.into_iter().enumerate() {
        let bytes = if name.ends_with(".html") {
            let text = String::from_utf8(bytes).context("a page")?;
            text.replace("{PRELOAD}", &preload.join("\n")).replace("{FILES}", &place).into_bytes()
        } else {
            bytes
        };
        let packed = out.join(format!("{number}.gz"));
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&bytes)?;
        fs::write(&packed, encoder.finish()?).context("a file of the viewer")?;
        writeln!(list, "    ({name:?}, include_bytes!({packed:?})),")?;
    }
    list.push_str("];\n");
    fs::write(out.join("viewer.rs"), list).context("viewer.rs")
}

/// All modules that one imports, directly or not: a browser that is told of them at once need not
/// find them one after another. The sources are formatted, so that lines are what they seem.
fn modules(files: &[(String, Vec<u8>)], first: &str) -> Result<Vec<String>> {
    let mut found = vec![first.to_owned()];
    let mut at = 0;
    while let Some(name) = found.get(at).cloned() {
        at += 1;
        let file = files.iter().find(|(it, _)| *it == name);
        let (_, bytes) = file.with_context(|| format!("{name}: no such module"))?;
        let folder = name.rsplit_once('/').map_or("", |it| it.0);
        for line in String::from_utf8_lossy(bytes).lines().map(str::trim) {
            let import = line.starts_with("import ") || line.starts_with("} from ");
            let Some(path) = line.split(['"', '\'']).nth(1).filter(|_| import) else { continue };
            let mut parts: Vec<_> = folder.split('/').filter(|it| !it.is_empty()).collect();
            for part in path.split('/') {
                match part {
                    "." => {}
                    ".." => drop(parts.pop()),
                    part => parts.push(part),
                }
            }
            let path = parts.join("/");
            if !found.contains(&path) {
                found.push(path);
            }
        }
    }
    found.remove(0);
    Ok(found)
}

/// Has npm put noVNC, exactly as the lock file has it, into a folder; once, while that stays as it
/// is. No script of a package is run.
fn install(sources: &Path, out: &Path) -> Result<PathBuf> {
    const LOCK: &str = "package-lock.json";
    let (novnc, stamp) = (out.join("node_modules/@novnc/novnc"), out.join("installed"));
    let lock = fs::read(sources.join(LOCK)).context(LOCK)?;
    if novnc.exists() && fs::read(&stamp).is_ok_and(|it| it == lock) {
        return Ok(novnc);
    }
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    for name in ["package.json", LOCK] {
        fs::copy(sources.join(name), out.join(name)).context(name)?;
    }
    let mut npm = Command::new("npm");
    npm.current_dir(out).args(["ci", "--ignore-scripts", "--prefer-offline", "--no-audit"]);
    npm.args(["--no-fund", "--no-update-notifier", "--loglevel=error"]);
    let ended = match npm.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!(
                "npm is missing, which fetches noVNC for the browser viewer: please run apt-get \
                 install npm"
            )
        }
        ended => ended.context("starting npm")?,
    };
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "npm ci, for the browser viewer: {}", said.trim());
    fs::write(stamp, lock).context("a note")?;
    Ok(novnc)
}

/// A file, or all files of a folder, with their names for browsers.
fn gather(path: &Path, name: &str, files: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let wrong = || path.display().to_string();
    if path.is_file() {
        files.push((name.to_owned(), fs::read(path).with_context(wrong)?));
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(wrong)? {
        let entry = entry?;
        let part = entry.file_name().into_string().ok().context("a name that is no text")?;
        let name = if name.is_empty() { part } else { format!("{name}/{part}") };
        gather(&entry.path(), &name, files)?;
    }
    Ok(())
}
