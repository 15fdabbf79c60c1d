//! Records of QEMU's machine: what a suite's guest saw on it in an earlier run, kept in the
//! repository. A record spares the minutes of that run for as long as our machine fits to it.

use crate::lab;

/// Fails if `judge` refuses both the record and what QEMU shows now. With `TRANSOM_TESTS=all`, the
/// record is not asked.
pub fn or_live<T>(
    record: impl FnOnce() -> anyhow::Result<T>,
    live: impl FnOnce() -> anyhow::Result<T>,
    judge: impl Fn(&T) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if lab::everything() {
        return judge(&live()?);
    }
    let Err(error) = record().and_then(|it| judge(&it)) else { return Ok(()) };
    crate::say!("QEMU runs again, because its record does not fit:\n{error:#}");
    judge(&live()?)
}
