//! Opens the medium of a drive.

use std::path::Path;
use std::sync::Arc;

use anyhow::ensure;

use super::unit::CD_BLOCK;
use host::disk::{Drive, FileId, MediumOpener};

/// Opens the file of a medium, which must be `only`.
pub(crate) fn open(
    opener: &MediumOpener,
    path: &Path,
    only: Option<FileId>,
    cdrom: bool,
) -> anyhow::Result<Arc<Drive>> {
    let drive = opener.open(path, only)?;
    let size = drive.geometry().size;
    let rest = size % u64::from(CD_BLOCK);
    if cdrom {
        ensure!(size > rest, "{}: {size} bytes are less than one block of a CD", path.display());
        if rest > 0 {
            let path = path.display();
            tracing::warn!(
                "{path}: a CD has blocks of {CD_BLOCK} bytes; the last {rest} of {size} bytes \
                 cannot be read"
            );
        }
    }
    Ok(drive)
}
