//! Direct I/O, which bypasses the host's page cache.

use std::fs::File;

use anyhow::{Context, ensure};
use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, statx};

use super::medium::Buffer;
use super::{Config, Direct};

/// The alignment that direct I/O requires, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    pub(super) memory: u64,
    /// For offsets and lengths.
    pub(super) length: u64,
}

/// Switches to direct I/O as configured. `None` means the page cache.
pub(super) fn switch(file: &File, config: &Config) -> anyhow::Result<Option<Alignment>> {
    if config.direct == Direct::Off {
        return Ok(None);
    }
    let name = config.path.display();
    let flags = fcntl_getfl(file).with_context(|| name.to_string())?;
    let sector = u64::from(config.sector.bytes());
    let refusal =
        match fcntl_setfl(file, flags | OFlags::DIRECT).ok().and_then(|()| alignment(file)) {
            Some(alignment) if alignment.length <= sector => return Ok(Some(alignment)),
            Some(Alignment { length, .. }) => format!(
                "it needs blocks of {length} bytes, but the disk has sectors of {sector} \
             (use `sector=4096`)"
            ),
            None => "its file system does not support it".to_owned(),
        };
    ensure!(config.direct == Direct::Auto, "no direct I/O on {name}: {refusal}");
    fcntl_setfl(file, flags).with_context(|| name.to_string())?;
    tracing::info!(disk = %name, "no direct I/O, using the page cache: {refusal}");
    Ok(None)
}

/// The alignment that direct I/O requires for this file, on which it is enabled. `None` if it does
/// not work at all.
fn alignment(file: &File) -> Option<Alignment> {
    let found = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if found.stx_mask & StatxFlags::DIOALIGN.bits() != 0 {
        let memory = u64::from(found.stx_dio_mem_align);
        let length = u64::from(found.stx_dio_offset_align);
        let sound = memory.is_power_of_two() && length.is_power_of_two();
        return sound.then_some(Alignment { memory, length });
    }
    // Older kernels and some file systems do not report it, so try.
    let mut buffer = Buffer::default();
    let buffer = buffer.take(8192);
    let mut works = |start: usize, length: usize| {
        let part = &mut buffer[start..start + length];
        rustix::io::pread(file, part, 0).is_ok()
    };
    let length = [512, 4096].into_iter().find(|length| works(0, *length))?;
    let memory = [512, 4096].into_iter().find(|start| works(*start % 4096, 4096))?;
    Some(Alignment { memory: memory as u64, length: length as u64 })
}
