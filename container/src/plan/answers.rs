//! Files of the set-up disk, as an environment makes them, for people to read.

use std::path::Path;

use anyhow::Context as _;

use crate::answer::xml::Secrets;
use crate::answer::{self, AUTOUNATTEND, custom, from_settings};
use crate::disks::below;
use crate::settings::Compat;
use crate::settings::environment::{self, Environment, ParsedEnvironment};
use crate::settings::host::Host;
use crate::settings::settle::settle;
use crate::status::{Failure, Status};

/// The file that is shown unless the user names one.
pub const DEFAULT: &str = AUTOUNATTEND;
/// Folders of the user's files for Windows, below the root and on the volume.
const OEM_FOLDERS: [&str; 2] = ["oem", "OEM"];
const MAX_SCRIPT: u64 = 1 << 20;

/// A file of the set-up disk by its name, and warnings, one sentence each.
///
/// # Errors
///
/// If the environment is invalid, or its settings make no file of this name.
pub fn file(
    environment: &Environment,
    root: &Path,
    name: &str,
    secrets: Secrets,
) -> anyhow::Result<(Vec<u8>, Vec<String>)> {
    let input = environment::read(environment)?;
    check(&input, secrets)?;
    let settings = &input.settings;
    let (product, release) = from_settings::product(&settings.windows.version)?;
    let volume = below(root, &settings.storage.folder);
    let (sizes, _) = settle(&input, &Host::read(root, &volume))?;
    let machine = from_settings::machine(settings, &sizes);
    let (answers, warnings) = from_settings::answers(settings, (product, release), machine);
    if name.eq_ignore_ascii_case(AUTOUNATTEND)
        && let Some((path, kind)) = custom::find(root, &volume, product.id)
    {
        let text = custom::load(&path, kind, &answers, secrets)?;
        return Ok((text.into_bytes(), warnings));
    }
    let install = install_bat(root, &volume)?;
    let files = answer::files(&answers, install.as_deref(), secrets)?;
    let names: Vec<_> = files.iter().map(|file| file.name()).collect();
    let found = files.iter().find(|file| file.name().eq_ignore_ascii_case(name));
    let found = found.ok_or_else(|| {
        let names = names.join(", ");
        let shown = crate::settings::value::quote(name);
        Failure::new(Status::Usage, format!("{shown}: these settings make only {names}"))
    })?;
    Ok((found.bytes.clone(), warnings))
}

/// Settings with which there is nothing to show.
fn check(input: &ParsedEnvironment, secrets: Secrets) -> anyhow::Result<()> {
    let settings = &input.settings;
    if settings.windows.manual {
        let sentence = "MANUAL=Y: a person answers Windows Setup: leave it out";
        return Err(Failure::new(Status::Usage, sentence));
    }
    let is_made = !input.names.contains("PASSWORD") && settings.pod.compat != Compat::Dockur;
    if is_made && secrets == Secrets::Shown {
        let sentence = "PASSWORD is not set: set it, or leave --secrets out";
        return Err(Failure::new(Status::Usage, sentence));
    }
    Ok(())
}

/// The user's `install.bat`.
fn install_bat(root: &Path, volume: &Path) -> anyhow::Result<Option<Vec<u8>>> {
    let folders = OEM_FOLDERS.iter().flat_map(|name| [root.join(name), volume.join(name)]);
    let Some(path) = folders.map(|it| it.join("install.bat")).find(|it| it.is_file()) else {
        return Ok(None);
    };
    custom::bytes(&path, MAX_SCRIPT).map(Some).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod test {
    use super::*;

    fn shown(root: &Path, words: &[(&str, &str)], name: &str) -> anyhow::Result<String> {
        let small = [("RAM_MINIMUM", "1M"), ("RAM_CHECK", "N")];
        let words = small.iter().chain(words).map(|(name, text)| (name.into(), text.into()));
        let (bytes, _) = file(&words.collect(), root, name, Secrets::Masked)?;
        Ok(String::from_utf8(bytes)?)
    }

    #[test]
    fn the_users_files_take_part() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir_all(root.join("storage/oem")).unwrap();
        let own = shown(root, &[], DEFAULT).unwrap();
        assert!(own.contains("<UserAccounts>") && own.contains("<Value>***</Value>"), "{own}");
        let error = shown(root, &[], "install.bat").unwrap_err().to_string();
        assert!(
            error.contains("install.bat: these settings make only Autounattend.xml"),
            "{error}"
        );
        std::fs::write(root.join("storage/oem/install.bat"), "echo 1\n").unwrap();
        let script = shown(root, &[("COMMAND", "echo 2")], "INSTALL.BAT").unwrap();
        assert_eq!(script, "echo 1\r\necho 2\r\n");
        let custom = "<unattend><settings pass=\"windowsPE\"><component \
                      name=\"Microsoft-Windows-Setup\"><A/></component></settings></unattend>";
        std::fs::write(root.join("custom.xml"), custom).unwrap();
        let theirs = shown(root, &[], DEFAULT).unwrap();
        assert!(theirs.contains("<A/><UseConfigurationSet>true</UseConfigurationSet>"), "{theirs}");
    }

    #[test]
    fn versions_without_answer_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for (words, status) in [
            (("VERSION", "probe"), Status::Version),
            (("MANUAL", "Y"), Status::Usage),
            (("WORKGROUP", "a/b"), Status::Usage),
        ] {
            let error = shown(folder.path(), &[words], DEFAULT).unwrap_err();
            assert_eq!(Status::of(&error), status, "{error:#}");
        }
        let input = environment::read(&Environment::new()).unwrap();
        assert!(check(&input, Secrets::Masked).is_ok() && check(&input, Secrets::Shown).is_err());
    }
}
