//! Packs the browser viewer of `web`, for `src/web/files.rs` to serve.

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;

fn main() -> ExitCode {
    match embed_viewer() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Watching the folder finds added and removed files. Watching each file finds changes to it.
fn rerun_for_changes(sources: &Path) -> Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", sources.display());
    let files = fs::read_dir(sources).with_context(|| format!("reading {}", sources.display()))?;
    for file in files {
        println!("cargo::rerun-if-changed={}", file?.path().display());
    }
    Ok(())
}

/// The folder of our page and of the lock file for noVNC, relative to this package.
const VIEWER: &str = "web";
/// The parts of noVNC that a browser needs, and its authors and license.
const NOVNC: [&str; 5] = ["core", "vendor", "AUTHORS", "LICENSE.txt", "docs/LICENSE.MPL-2.0"];

/// Writes `viewer.rs`: the compressed files of the browser viewer, and the URL path they have.
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
    // The path contains a hash of the files, so browsers may cache them without a time limit.
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    let folder_url = format!("files/{:016x}", hasher.finish());
    let mut list =
        format!("const FOLDER: &str = {folder_url:?};\nconst FILES: &[(&str, &[u8])] = &[\n");
    let preload: Vec<_> = modules(&files, "viewer.js")?
        .into_iter()
        .map(|name| format!("<link rel=\"modulepreload\" href=\"{folder_url}/{name}\">"))
        .collect();
    for (number, (name, bytes)) in files.into_iter().enumerate() {
        let bytes = if name.ends_with(".html") {
            let text = String::from_utf8(bytes).context("a page")?;
            text.replace("{PRELOAD}", &preload.join("\n"))
                .replace("{FILES}", &folder_url)
                .into_bytes()
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

/// All modules that `first` imports, directly or not. The page lists them for preloading, so that
/// the browser need not find them one after another. Reading line by line works because the sources
/// are formatted.
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

/// Installs the noVNC of the lock file with npm, unless that was done already for the same lock
/// file. Runs no scripts of packages.
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
                "npm is missing: it fetches noVNC for the browser viewer; run apt-get install npm"
            )
        }
        ended => ended.context("starting npm")?,
    };
    let stderr = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "npm ci, for the browser viewer: {}", stderr.trim());
    fs::write(stamp, lock).context("installed")?;
    Ok(novnc)
}

/// Collects a file, or all files of a folder, with their paths below the URL.
fn gather(path: &Path, name: &str, files: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let shown = || path.display().to_string();
    if path.is_file() {
        files.push((name.to_owned(), fs::read(path).with_context(shown)?));
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(shown)? {
        let entry = entry?;
        let part = entry.file_name().into_string().ok().context("a file name is not UTF-8")?;
        let name = if name.is_empty() { part } else { format!("{name}/{part}") };
        gather(&entry.path(), &name, files)?;
    }
    Ok(())
}
