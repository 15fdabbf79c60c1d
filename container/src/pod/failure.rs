//! The errors of a machine that was killed, or boots nothing.

use std::path::Path;

use crate::settings::Boot;
use crate::source::Source;
use crate::status::{Failure, Status};

/// `starved` is set if the kernel killed the machine for lack of memory; its value says whether the
/// pod has a memory limit.
pub(super) fn killed_error(app: &str, signal: i32, starved: Option<bool>) -> anyhow::Error {
    let out = match starved {
        Some(true) => "the container's memory limit was reached: raise it, or lower RAM_SIZE",
        Some(false) => "the host had no memory left: free some there, or lower RAM_SIZE",
        None => "start it again",
    };
    let kept = "acknowledged writes to its disk are not lost";
    Failure::new(Status::Failed, format!("{app} was ended by signal {signal}: {out}: {kept}"))
}

/// `mark` is the file that makes the disk boot before media.
pub(super) fn nothing_boots_error(
    source: &Source,
    boot: Boot,
    mark: Option<&Path>,
    last: &str,
) -> anyhow::Error {
    let out = match source {
        _ if boot.is_secure() && last.contains("Access Denied") => {
            "Secure Boot refused an unsigned system, or one with an unknown signature: set \
             BOOT_MODE=windows to start it without Secure Boot"
                .to_owned()
        }
        Source::Medium(path) => {
            format!("{} cannot be booted with UEFI: try another ISO image", path.display())
        }
        _ => {
            let disk = "the disk has no system for UEFI: mount an ISO as";
            match mark {
                Some(mark) => format!(
                    "{disk} /start.iso, which boots before the disk, or, to install anew, delete \
                     the disk and {}",
                    mark.display()
                ),
                None => format!(
                    "{disk} /start.iso, which boots before the disk, or delete the disk to install \
                     anew"
                ),
            }
        }
    };
    Failure::new(
        Status::Failed,
        format!("the firmware found nothing to boot: {out}. Its last lines:\n{last}"),
    )
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_out_of_memory_kill_is_told_apart_from_other_kills() {
        let of = |starved| format!("{:#}", killed_error("Windows", 9, starved));
        assert!(of(None).starts_with("Windows was ended by signal 9: start it again: "));
        assert!(of(Some(true)).contains("memory limit was reached: raise it, or lower RAM_SIZE"));
        assert!(of(Some(false)).contains("the host had no memory left"));
    }

    #[test]
    fn a_boot_without_a_bootable_device_explains_itself() {
        let medium = Source::Medium("/custom.iso".into());
        let of = |boot, last| format!("{:#}", nothing_boots_error(&medium, boot, None, last));
        let denied = "BdsDxe: failed to load Boot0001 \"UEFI Misc Device\" from \
                      PciRoot(0x0)/Pci(0x2,0x0): Access Denied";
        let (refused, plain) = (of(Boot::Secure, denied), of(Boot::Uefi, denied));
        assert!(refused.contains("BOOT_MODE=windows") && refused.ends_with(denied), "{refused}");
        assert!(plain.contains("/custom.iso cannot be booted"), "{plain}");
        assert!(of(Boot::Secure, "BdsDxe: Not Found").contains("/custom.iso cannot be booted"));
        let disk = Source::Disk("/storage/data.img".into());
        let of = |mark| format!("{:#}", nothing_boots_error(&disk, Boot::Uefi, mark, ""));
        // With the mark, the disk boots before any /custom.iso.
        let marked = of(Some(Path::new("/storage/windows.boot")));
        let ways = ["as /start.iso", "delete the disk and /storage/windows.boot"];
        assert!(ways.iter().all(|way| marked.contains(way)), "{marked}");
        assert!(of(None).contains("or delete the disk to install anew."), "{}", of(None));
    }
}
