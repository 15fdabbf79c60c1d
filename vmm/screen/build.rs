//! Packs the browser viewer of `web`, for `src/web/viewer.rs` to serve.

use std::process::ExitCode;

use anyhow::Result;
use pack::Pack;

/// The parts of noVNC that a browser needs, and its authors and license.
const NOVNC: [&str; 5] = ["core", "vendor", "AUTHORS", "LICENSE.txt", "docs/LICENSE.MPL-2.0"];

fn main() -> ExitCode {
    match embed_viewer() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn embed_viewer() -> Result<()> {
    let mut pack = Pack::new()?;
    pack.add("page", "")?;
    pack.add_module("@novnc/novnc", &NOVNC, "novnc")?;
    pack.write("files", "viewer.js")
}
