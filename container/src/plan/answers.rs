//! Files of the set-up disk, as an environment makes them, for people to read.

use std::path::Path;

use crate::answer::AUTOUNATTEND;
use crate::answer::target::Target;
use crate::answer::xml::Secrets;
use crate::disks::below;
use crate::settings::environment::Environment;
use crate::setup_disk::UsersFiles;
use crate::status::{Failure, Status};

use super::Plan;
use super::unattended::Unattended;

/// The file that is shown unless the user names one.
pub const DEFAULT: &str = AUTOUNATTEND;

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
    let plan = Plan::make(environment, root)?;
    let unattended = unattended(&plan, root)?;
    if unattended.makes_password(&plan.input) && secrets == Secrets::Shown {
        let sentence = "PASSWORD is not set: set it, or leave --secrets out";
        return Err(Failure::new(Status::Usage, sentence));
    }
    let settings = &plan.input.settings;
    let bus = unattended.controller(&plan.input).unwrap_or(settings.disk.controller.value);
    let (answers, warnings) = unattended.answers(settings, &plan.sizes, bus);
    let users = UsersFiles::read(root, &below(root, &settings.storage.folder))?;
    let files = unattended.files(&answers, users.install_bat.as_deref(), secrets)?;
    let names: Vec<_> = files.iter().map(|file| file.name()).collect();
    let found = files.iter().find(|file| file.name().eq_ignore_ascii_case(name));
    let found = found.ok_or_else(|| {
        let names = names.join(", ");
        let shown = crate::settings::value::quote(name);
        Failure::new(Status::Usage, format!("{shown}: these settings make only {names}"))
    })?;
    Ok((found.bytes.clone(), warnings))
}

/// The installation of the plan, or of VERSION if the plan installs nothing.
fn unattended(plan: &Plan, root: &Path) -> anyhow::Result<Unattended> {
    let windows = &plan.input.settings.windows;
    if windows.manual {
        let sentence = "MANUAL=Y: a person answers Windows Setup: leave it out";
        return Err(Failure::new(Status::Usage, sentence));
    }
    match &plan.unattended {
        Some(unattended) => Ok(unattended.clone()),
        None => Unattended::with(Target::of_version(windows)?, &plan.input.settings, root),
    }
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
        let secret = |words: &[(&str, &str)]| {
            let small = [("RAM_MINIMUM", "1M"), ("RAM_CHECK", "N")];
            let words = small.iter().chain(words).map(|(name, text)| (name.into(), text.into()));
            file(&words.collect(), folder.path(), DEFAULT, Secrets::Shown).map(drop)
        };
        assert!(secret(&[]).unwrap_err().to_string().starts_with("PASSWORD is not set"));
        assert!(secret(&[("PASSWORD", "hush")]).is_ok() && secret(&[("COMPAT", "dockur")]).is_ok());
    }
}
