//! Packs the page of the remote desktop, for `src/web/desktop.rs` to serve.

use std::process::ExitCode;

use anyhow::Result;
use pack::Pack;

/// Files that this page shares with the viewer.
const SHARED: [&str; 4] = ["icon.svg", "page.js", "sound.js", "style.css"];
/// IronRDP: the client without its Web Component, which our policy for styles forbids.
const CLIENT: &str = "@devolutions/iron-remote-desktop-rdp";
const PARTS: [&str; 1] = ["iron-remote-desktop-rdp.js"];

/// The table of scan codes of noVNC, and its license.
const NOVNC: [&str; 4] =
    ["core/input/xtscancodes.js", "AUTHORS", "LICENSE.txt", "docs/LICENSE.MPL-2.0"];

fn main() -> ExitCode {
    match embed_desktop() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn embed_desktop() -> Result<()> {
    let mut pack = Pack::new()?;
    pack.add("desktop", "")?;
    for name in SHARED {
        pack.add(&format!("../../vmm/screen/web/page/{name}"), name)?;
    }
    pack.add_module(CLIENT, &PARTS, "ironrdp")?;
    pack.add_module("@novnc/novnc", &NOVNC, "novnc")?;
    pack.write("desktop/files", "desktop.js")
}
