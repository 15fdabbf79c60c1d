//! Starts a CD of Microsoft's without its question "Press any key to boot from CD or DVD".
//!
//! Firmware starts the image `efisys.bin`, whose loader asks. Beside it is `efisys_noprompt.bin`,
//! whose loader does not. The patch changes the sector in the boot catalog's entry from one to the
//! other. No checksum covers it.

use host::disk::Patch;

use super::el_torito::{self, Entry};
use super::{Content, FileSystem, Image, SECTOR, sector};

const ASKS: &str = "efi/microsoft/boot/efisys.bin";
const DOES_NOT_ASK: &str = "efi/microsoft/boot/efisys_noprompt.bin";

/// Maximum bytes of a boot image. Microsoft's are of 1.44 MB.
const MAX_LENGTH: u64 = 16 << 20;

/// Whether the CD waits for a key before it boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// It does not: it was made without.
    Never,
    /// It does not if its drive answers reads with this patch.
    Avoided(Patch),
    /// It does, or nothing is known.
    Asked,
}

/// Finds out whether and how the question can be avoided.
pub fn question(image: &(impl Image + ?Sized), files: &FileSystem) -> anyhow::Result<Question> {
    let entries = el_torito::entries(image)?;
    let mut entries = entries.iter().filter(|it| it.platform == el_torito::EFI && it.bootable);
    let (Some(entry), None) = (entries.next(), entries.next()) else {
        return Ok(Question::Asked);
    };
    let quiet = files.find(image, DOES_NOT_ASK)?.and_then(|file| boot_image(image, &file));
    let Some(quiet) = quiet else { return Ok(Question::Asked) };
    if quiet.sector == entry.sector {
        return Ok(Question::Never);
    }
    let asking = files.find(image, ASKS)?.and_then(|file| boot_image(image, &file));
    let Some(asking) = asking.filter(|it| it.length == quiet.length) else {
        return Ok(Question::Asked);
    };
    let fits = entry.emulation == 0
        && u64::from(entry.count) * 512 <= quiet.length
        && leads_to(image, entry, &asking)?;
    Ok(if fits { Question::Avoided(patch(entry, quiet.sector)) } else { Question::Asked })
}

/// Whether the entry leads to this file, or to a copy of it.
fn leads_to(
    image: &(impl Image + ?Sized),
    entry: &Entry,
    file: &BootImage,
) -> anyhow::Result<bool> {
    if entry.sector == file.sector {
        return Ok(true);
    }
    for number in 0..file.length.div_ceil(SECTOR) {
        let copy = sector(image, u64::from(entry.sector) + number)?;
        if copy.is_none() || copy != sector(image, u64::from(file.sector) + number)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A file that firmware can start: in one piece, at the start of a sector.
struct BootImage {
    sector: u32,
    length: u64,
}

fn boot_image(image: &(impl Image + ?Sized), file: &Content) -> Option<BootImage> {
    let extent = file.whole().filter(|it| it.start.is_multiple_of(SECTOR))?;
    if extent.length > MAX_LENGTH {
        return None;
    }
    file.check(image).ok()?;
    let sector = u32::try_from(extent.start / SECTOR).ok()?;
    Some(BootImage { sector, length: extent.length })
}

fn patch(entry: &Entry, sector: u32) -> Patch {
    Patch {
        offset: entry.sector_at,
        old: entry.sector.to_le_bytes().to_vec(),
        new: sector.to_le_bytes().to_vec(),
    }
}
