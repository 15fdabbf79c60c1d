//! Packs the files of a web page into a program. Build scripts use it, and `screen::web::files`
//! serves the files.

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;

/// The folder of this package with the page, and with the lock file for the packages it uses.
const SOURCES: &str = "web";

/// Files of a page, by their path below the page's URL.
pub struct Pack {
    /// The folder of this package with the page.
    sources: PathBuf,
    /// The output folder.
    out: PathBuf,
    files: Vec<(String, Vec<u8>)>,
}

impl Pack {
    /// Prepares to pack the folder `web` of the package that is being built.
    pub fn new() -> Result<Self> {
        let package =
            PathBuf::from(env::var("CARGO_MANIFEST_DIR").context("not started by cargo")?);
        let out = PathBuf::from(env::var("OUT_DIR").context("not started by cargo")?).join(SOURCES);
        let sources = package.join(SOURCES);
        rerun_for(Path::new("build.rs"));
        watch(&sources)?;
        fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
        Ok(Self { sources, out, files: Vec::new() })
    }

    /// Adds a file or a folder of the package. Its name may lead out of `web`.
    pub fn add(&mut self, source: &str, name: &str) -> Result<()> {
        let path = self.sources.join(source);
        watch(&path)?;
        gather(&path, name, &mut self.files)
    }

    /// Adds files of a package from npm.
    pub fn add_module(&mut self, package: &str, parts: &[&str], name: &str) -> Result<()> {
        let folder = install(&self.sources, &self.out)?.join(package);
        for part in parts {
            gather(&folder.join(part), &format!("{name}/{part}"), &mut self.files)?;
        }
        Ok(())
    }

    /// Writes `files.rs` with a `Folder` of the compressed files. Its URL begins with `prefix`. The
    /// pages preload the modules that `script` imports.
    pub fn write(mut self, prefix: &str, script: &str) -> Result<()> {
        self.files.sort();
        // The path contains a hash of the files, so browsers may cache them without a time limit.
        let mut hasher = DefaultHasher::new();
        self.files.hash(&mut hasher);
        let url = format!("{prefix}/{:016x}", hasher.finish());
        let mut list = format!("Folder {{ url: {url:?}, files: &[\n");
        let preload: Vec<_> = modules(&self.files, script)?
            .into_iter()
            .map(|name| format!("<link rel=\"modulepreload\" href=\"{url}/{name}\">"))
            .collect();
        for (number, (name, bytes)) in self.files.into_iter().enumerate() {
            let bytes = if name.ends_with(".html") {
                let text = String::from_utf8(bytes).context("a page")?;
                text.replace("{PRELOAD}", &preload.join("\n")).replace("{FILES}", &url).into_bytes()
            } else {
                bytes
            };
            let packed = self.out.join(format!("{number}.gz"));
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            encoder.write_all(&bytes)?;
            fs::write(&packed, encoder.finish()?).context("a file of the page")?;
            writeln!(list, "    ({name:?}, include_bytes!({packed:?})),")?;
        }
        list.push_str("] }\n");
        fs::write(self.out.join("files.rs"), list).context("files.rs")
    }
}

#[expect(clippy::print_stdout, reason = "cargo reads the output of build scripts")]
fn rerun_for(path: &Path) {
    println!("cargo::rerun-if-changed={}", path.display());
}

/// Watching a folder finds added and removed files. Watching each file finds changes to it.
fn watch(path: &Path) -> Result<()> {
    rerun_for(path);
    if path.is_dir() {
        let files = fs::read_dir(path).with_context(|| format!("reading {}", path.display()))?;
        for file in files {
            rerun_for(&file?.path());
        }
    }
    Ok(())
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

/// Installs the packages of the lock file with npm, unless that was done already for the same lock
/// file. Runs no scripts of packages. Returns the folder with all packages.
fn install(sources: &Path, out: &Path) -> Result<PathBuf> {
    const LOCK: &str = "package-lock.json";
    let (packages, stamp) = (out.join("node_modules"), out.join("installed"));
    let lock = fs::read(sources.join(LOCK)).context(LOCK)?;
    if packages.exists() && fs::read(&stamp).is_ok_and(|it| it == lock) {
        return Ok(packages);
    }
    for name in ["package.json", LOCK] {
        fs::copy(sources.join(name), out.join(name)).context(name)?;
    }
    let mut npm = Command::new("npm");
    npm.current_dir(out).args(["ci", "--ignore-scripts", "--prefer-offline", "--no-audit"]);
    npm.args(["--no-fund", "--no-update-notifier", "--loglevel=error"]);
    let ended = match npm.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("npm is missing: it fetches the viewers for browsers; run apt-get install npm")
        }
        ended => ended.context("starting npm")?,
    };
    let stderr = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "npm ci, for the viewers of browsers: {}", stderr.trim());
    fs::write(stamp, lock).context("installed")?;
    Ok(packages)
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
