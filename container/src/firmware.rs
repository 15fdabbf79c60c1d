//! Selects the machine's firmware, and reads the boot mode that is stored on the volume.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use crate::files;
use crate::media::windows::Media;
use crate::medium::is_microsofts;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::value::{Value as _, quote};
use crate::settings::version::Version;
use crate::settings::{Boot, Compat};
use crate::source::Source;
use crate::status::{Failure, Status};

/// Extension of the file on the volume that stores the boot mode.
pub const MODE: &str = "mode";
/// Folders of Debian's package, and of other distributions.
const FOLDERS: [&str; 2] = ["usr/share/OVMF", "usr/share/edk2/ovmf"];
/// The name in Microsoft's certificate of 2023, with which updates of the keys are signed.
const KEY_OF_2023: &[u8] = b"Microsoft Corporation KEK 2K CA 2023";
/// Variable stores are smaller.
const MAX_STORE: u64 = 1 << 20;

#[derive(Debug)]
pub struct Firmware {
    pub code: PathBuf,
    /// The template of the variables.
    pub template: PathBuf,
    /// It runs in system-management mode (SMM), where the guest's kernel cannot change its keys.
    pub smm: bool,
}

/// Finds the firmware below `root`. `has_smm` tells whether the host has SMM, and is called if that
/// matters.
pub fn find(boot: Boot, root: &Path, has_smm: impl FnOnce() -> bool) -> anyhow::Result<Firmware> {
    let template = match boot.is_secure() {
        false => "OVMF_VARS_4M.fd",
        // This template has the keys of Microsoft and of Debian, and enables Secure Boot.
        true => "OVMF_VARS_4M.ms.fd",
    };
    for folder in FOLDERS.map(|folder| root.join(folder)) {
        let [secure, plain, template] =
            ["OVMF_CODE_4M.secboot.fd", "OVMF_CODE_4M.fd", template].map(|name| folder.join(name));
        if plain.is_file() && template.is_file() {
            let smm = boot.is_secure() && secure.is_file() && has_smm();
            return Ok(Firmware { code: if smm { secure } else { plain }, template, smm });
        }
    }
    let place = FOLDERS[0];
    let sentence = match boot.is_secure() {
        false => format!(
            "no firmware is at /{place}: use the original image, or mount Debian's package ovmf"
        ),
        true => format!(
            "BOOT_MODE={}, which Windows 11 needs: no firmware with Secure Boot is at /{place}: \
             build the image with that of Debian 12, or set BOOT_MODE=windows",
            boot.show()
        ),
    };
    Err(Failure::new(Status::Boot, sentence))
}

/// A sentence if the variables of an existing machine lack keys that a new machine gets from the
/// template. They stay as they are: the TPM measures them, and BitLocker would ask for its recovery
/// key.
pub fn old_keys(vars: &Path, template: &Path) -> Option<String> {
    let has = |path: &Path| -> io::Result<bool> {
        let mut bytes = Vec::new();
        let file = files::open(path, OpenOptions::new().read(true))?;
        file.take(MAX_STORE).read_to_end(&mut bytes)?;
        Ok(bytes.windows(KEY_OF_2023.len()).any(|it| it == KEY_OF_2023))
    };
    // Firmware reports a store that cannot be read.
    let is_old = has(template).ok()? && !has(vars).ok()?;
    is_old.then(|| {
        format!(
            "{}: it has Microsoft's Secure Boot keys of 2011 alone, and programs that are signed \
             with those of 2023 may not start: to get both, suspend BitLocker in Windows, stop \
             this container, and delete the file",
            vars.display()
        )
    })
}

/// Applies the boot mode that is stored on the volume, unless BOOT_MODE is set: a system that was
/// installed with Secure Boot keeps it.
pub fn recall(input: &mut ParsedEnvironment, volume: &Path) -> anyhow::Result<()> {
    let path = volume.join(format!("{}.{MODE}", input.settings.pod.process()));
    let text = match files::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        // Without Secure Boot and its TPM, BitLocker would ask for its recovery key.
        Err(error) => {
            let out = "restore it, or delete it and set BOOT_MODE";
            let sentence = format!("{}: {error}: {out}", path.display());
            return Err(Failure::new(Status::State, sentence));
        }
    };
    match text.trim() {
        mode @ ("windows_legacy" | "legacy") => {
            let sentence = format!(
                "{}: {mode}: the disk boots with a BIOS, but this machine has UEFI: convert the \
                 disk with mbr2gpt where it runs now, and delete this file",
                path.display()
            );
            return Err(Failure::new(Status::Boot, sentence));
        }
        mode if !input.names.contains("BOOT_MODE") => {
            input.settings.machine.boot = Boot::read(mode).unwrap_or_else(|_| {
                let (path, mode) = (path.display(), quote(mode));
                input.warnings.push(format!("{path}: {mode} is no boot mode: set BOOT_MODE"));
                Boot::default()
            });
        }
        mode => {
            let boot = input.settings.machine.boot;
            if Boot::read(mode).is_ok_and(Boot::is_secure) && !boot.is_secure() {
                input.warnings.push(format!(
                    "BOOT_MODE={}: this machine used {mode}, whose TPM has the keys: BitLocker \
                     will ask for its recovery key: leave BOOT_MODE out to keep the mode",
                    boot.show()
                ));
            }
        }
    }
    Ok(())
}

/// Enables Secure Boot (and with it the TPM) for an installation of Windows 11, whose setup
/// requires both. Other systems may not start with it. The disk is new if it has no system yet. The
/// reference image installs without both, unless a person installs.
pub fn adjust_boot_mode(
    input: &mut ParsedEnvironment,
    source: &Source,
    media: Option<&Media>,
    is_new: bool,
) {
    let is_windows = |path: &Path| media.is_some() || is_microsofts(path);
    let installs = matches!(source, Source::Medium(path) if is_windows(path));
    if installs && is_to_be_secure(input, media, is_new) {
        input.settings.machine.boot = Boot::Secure;
    }
}

fn is_to_be_secure(input: &ParsedEnvironment, media: Option<&Media>, is_new: bool) -> bool {
    let settings = &input.settings;
    let unattended = is_new && settings.pod.compat != Compat::Dockur;
    (settings.windows.manual || unattended) && lacks_secure_boot(input, media)
}

/// Checks that the firmware that a Windows needs is there, before it is downloaded.
pub fn check_before_download(input: &ParsedEnvironment, root: &Path) -> anyhow::Result<()> {
    let boot = match is_to_be_secure(input, None, true) {
        true => Boot::Secure,
        false => input.settings.machine.boot,
    };
    find(boot, root, || false).map(drop)
}

/// Whether this is Windows 11 without Secure Boot, which its setup requires, and BOOT_MODE is not
/// set. VERSION counts if the medium is unknown.
pub fn lacks_secure_boot(input: &ParsedEnvironment, media: Option<&Media>) -> bool {
    let version = &input.settings.windows.version;
    let asked = || matches!(version, Version::Windows(it) if it.id.starts_with("win11"));
    let eleven = media.map_or_else(asked, |media| media.product() == "Windows 11");
    eleven && !input.settings.machine.boot.is_secure() && !input.names.contains("BOOT_MODE")
}

#[cfg(test)]
mod test {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;
    use crate::settings::environment;

    #[test]
    fn secure_boot_needs_its_own_variable_store_with_keys() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDERS[1]);
        fs::create_dir_all(&folder).unwrap();
        let find = |boot, root| find(boot, root, || true);
        let error = find(Boot::Uefi, root.path()).unwrap_err();
        assert!(error.to_string().contains("no firmware is at /usr/share/OVMF"), "{error}");
        for name in ["OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"] {
            fs::write(folder.join(name), "x").unwrap();
        }
        assert!(find(Boot::Uefi, root.path()).is_ok());
        let error = find(Boot::Secure, root.path()).unwrap_err();
        assert_eq!(Status::of(&error), Status::Boot);
        assert!(error.to_string().starts_with("BOOT_MODE=windows_secure, "), "{error}");
        fs::write(folder.join("OVMF_VARS_4M.ms.fd"), "x").unwrap();
        let found = find(Boot::Secure, root.path()).unwrap();
        assert!(found.code.ends_with("OVMF_CODE_4M.fd") && !found.smm);
        assert!(found.template.ends_with("OVMF_VARS_4M.ms.fd"));
    }

    #[test]
    fn windows_11_without_its_firmware_is_refused_before_the_download() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDERS[0]);
        fs::create_dir_all(&folder).unwrap();
        for name in ["OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"] {
            fs::write(folder.join(name), "x").unwrap();
        }
        let check = |words: &[(&str, &str)]| {
            let words = words.iter().map(|(name, value)| ((*name).into(), (*value).into()));
            check_before_download(&environment::read(&words.collect()).unwrap(), root.path())
        };
        let error = check(&[("VERSION", "11")]).unwrap_err();
        assert_eq!(Status::of(&error), Status::Boot);
        for other in [("VERSION", "10"), ("BOOT_MODE", "windows"), ("COMPAT", "dockur")] {
            check(&[("VERSION", "11"), other]).unwrap();
        }
        fs::write(folder.join("OVMF_VARS_4M.ms.fd"), "x").unwrap();
        check(&[("VERSION", "11")]).unwrap();
    }

    #[test]
    fn secure_boot_uses_smm_where_host_and_firmware_have_it() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDERS[0]);
        fs::create_dir_all(&folder).unwrap();
        let names = ["CODE_4M.fd", "CODE_4M.secboot.fd", "VARS_4M.fd", "VARS_4M.ms.fd"];
        for name in names {
            fs::write(folder.join(format!("OVMF_{name}")), "x").unwrap();
        }
        for (boot, has_smm, code) in [
            (Boot::Secure, true, names[1]),
            (Boot::SecureBase, true, names[1]),
            (Boot::Secure, false, names[0]),
            (Boot::Uefi, true, names[0]),
        ] {
            let found = find(boot, root.path(), || has_smm).unwrap();
            assert_eq!(found.smm, code == names[1]);
            assert!(found.code.ends_with(format!("OVMF_{code}")), "{boot:?}: {found:?}");
        }
        let found = find(Boot::Uefi, root.path(), || panic!("not needed")).unwrap();
        assert!(found.template.ends_with("OVMF_VARS_4M.fd"));
    }

    #[test]
    fn old_keys_are_reported_if_the_template_has_new_ones() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let new = [b"\xff".as_slice(), KEY_OF_2023, b"\0"].concat();
        fs::write(at("new"), new).unwrap();
        fs::write(at("old"), "Microsoft Corporation KEK CA 2011").unwrap();
        let said = old_keys(&at("old"), &at("new")).unwrap();
        assert!(said.contains("keys of 2011 alone") && said.contains("old: "), "{said}");
        for (vars, template) in [("new", "new"), ("new", "old"), ("old", "old"), ("no", "new")] {
            assert_eq!(old_keys(&at(vars), &at(template)), None, "{vars} with {template}");
        }
    }

    #[test]
    fn every_secure_boot_mode_has_secure_boot() {
        let mut input = ParsedEnvironment::default();
        for boot in [Boot::Secure, Boot::SecureBase, Boot::Uefi, Boot::UefiPlain] {
            input.settings.machine.boot = boot;
            assert_eq!(lacks_secure_boot(&input, None), !boot.is_secure(), "{boot:?}");
        }
    }

    #[test]
    fn the_volume_keeps_the_boot_mode_of_the_installation() {
        let volume = tempfile::tempdir().unwrap();
        let mode = |text: &str, names: &[&'static str]| {
            fs::write(volume.path().join("windows.mode"), text).unwrap();
            let names = BTreeSet::from_iter(names.iter().copied());
            let mut input = ParsedEnvironment { names, ..ParsedEnvironment::default() };
            input.settings.pod.app.0 = "Windows".into();
            recall(&mut input, volume.path()).map(|()| {
                let lost = input.warnings.iter().any(|it| it.contains("BitLocker"));
                (input.settings.machine.boot, lost)
            })
        };
        assert_eq!(mode("windows_secure\n", &[]).unwrap(), (Boot::Secure, false));
        assert_eq!(mode("windows_secure\n", &["BOOT_MODE"]).unwrap(), (Boot::Uefi, true));
        assert_eq!(mode("windows_plain", &[]).unwrap(), (Boot::UefiPlain, false));
        assert_eq!(mode("secure", &[]).unwrap(), (Boot::SecureBase, false));
        assert_eq!(mode("x", &[]).unwrap(), (Boot::Uefi, false));
        let error = mode("windows_legacy", &["BOOT_MODE"]).unwrap_err();
        assert_eq!(Status::of(&error), Status::Boot);
        assert!(error.to_string().contains("mbr2gpt"), "{error}");
        let error = mode(&"x".repeat(5000), &[]).unwrap_err();
        assert_eq!(Status::of(&error), Status::State);
        assert!(error.to_string().contains("windows.mode: it is too long: "), "{error}");
    }
}
