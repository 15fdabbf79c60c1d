//! Translates QEMU's words into ours.
//!
//! `table` is the one list. A row has words, the scope in which they are valid, their translation,
//! or the sentence that says why they have none and what to use instead.

pub mod arguments;
mod command_line;
pub mod flags;
pub mod monitor;
pub mod options;
pub mod smbios;
pub mod table;
mod topology;

use anyhow::bail;

pub use self::topology::Topology;

use self::options::Options;
use self::table::{Scope, Translation};
use super::value::{Value, choices, quote};

/// An enum whose variants QEMU has words for.
pub trait FromQemu: Value + Default + PartialEq {
    const SCOPE: Scope;
    /// Whether an unknown word is an error. Otherwise the default is taken, with a note.
    const STRICT: bool = false;
}

/// A value that is written in QEMU's words.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Translated<T> {
    pub value: T,
    /// Notes on words that have no meaning here.
    pub notes: Vec<String>,
}

impl<T: FromQemu> Value for Translated<T> {
    const ACCEPTS: &'static str = T::ACCEPTS;

    fn read(text: &str) -> anyhow::Result<Self> {
        let options = Options::read(text);
        let word = options.first.to_lowercase();
        let mut notes = Vec::new();
        let value = match table::find(T::SCOPE, &word) {
            Some(Translation::Exact(own)) => T::read(own)?,
            Some(Translation::Nearest(own, why)) => {
                notes.push(format!("{} is not available; {own} is used: {why}", quote(&word)));
                T::read(own)?
            }
            Some(Translation::Refused(why)) => bail!("{why}"),
            _ if T::STRICT => bail!("give one of: {}", T::ACCEPTS),
            Some(Translation::Ignored(why)) => {
                notes.push(format!("{} has no effect: {why}", quote(&word)));
                T::default()
            }
            _ => {
                let (own, all) = (T::default().show(), T::ACCEPTS);
                notes.push(format!("{} is unknown; {own} is used: give {all}", quote(&word)));
                T::default()
            }
        };
        notes.extend(options.without_meaning());
        Ok(Self { value, notes })
    }
    fn show(&self) -> String {
        self.value.show()
    }
    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

macro_rules! from_qemu {
    ($($name:ident at $scope:ident $($strict:ident)?;)+) => {$(
        impl FromQemu for $name {
            const SCOPE: Scope = Scope::$scope;
            $(const STRICT: bool = from_qemu!(@$strict);)?
        }
    )+};
    (@strict) => { true };
}

from_qemu! {
    Bus at Bus strict;
    Cache at Cache strict;
    Engine at Engine strict;
    Adapter at Adapter;
    Screen at Screen;
    Display at Display;
    Kind at Kind;
    Usb at Usb;
    Sound at Sound;
    Pointer at Pointer;
    Model at Model;
    Serial at Serial;
}

choices! {
    /// The controller of a disk.
    Bus:
    /// The best one that the guest has drivers for.
    #[default]
    Auto "auto";
    /// virtio-scsi.
    Scsi "scsi";
    /// virtio-blk.
    Blk "blk";
    /// AHCI.
    Ahci "ide";
    /// NVMe.
    Nvme "nvme";
    /// USB mass storage.
    Usb "usb";
    /// No controller: the disk is not attached.
    None "none";
}

choices! {
    /// How the host caches a disk.
    Cache:
    /// Bypasses the host's page cache.
    #[default]
    Direct "none";
    /// Uses the host's page cache.
    Writeback "writeback";
    /// Uses the host's page cache and ignores flushes.
    Unsafe "unsafe";
}

choices! {
    /// The host's I/O engine.
    Engine:
    /// The fastest engine of this host.
    #[default]
    Native "native";
}

choices! {
    /// The guest's network card.
    Adapter:
    /// virtio-net.
    #[default]
    Virtio "virtio";
    /// Intel's 82574L, for which Windows has a driver.
    E1000e "e1000e";
}

choices! {
    /// The guest's display adapter.
    Screen:
    /// The adapter that firmware and Windows have drivers for.
    #[default]
    Standard "std";
    /// An adapter whose picture follows the viewer's window, if the guest has its driver.
    Virtio "virtio";
    /// No adapter.
    None "none";
}

choices! {
    /// How the screen is shown.
    Display:
    /// In browsers and by VNC.
    #[default]
    Web "web";
    /// By VNC.
    Vnc "vnc";
    /// Not at all. The guest still has a display adapter.
    Disabled "disabled";
    /// Not at all. The guest has no display adapter.
    None "none";
}

choices! {
    /// The chipset.
    Kind:
    /// Intel's Q35.
    #[default]
    Q35 "q35";
}

choices! {
    /// The USB controller.
    Usb:
    /// xHCI (USB 3).
    #[default]
    Xhci "xhci";
}

choices! {
    /// The sound card.
    Sound:
    /// Intel HDA with a codec for two channels.
    #[default]
    Hda "hda";
}

choices! {
    /// The pointing device.
    Pointer:
    /// A tablet, which reports absolute positions.
    #[default]
    Tablet "tablet";
}

choices! {
    /// The processor model.
    Model:
    /// The host's own.
    #[default]
    Host "host";
    /// The features of every processor since 2010 or so.
    V2 "x86-64-v2";
    /// Those of every processor with AVX2.
    V3 "x86-64-v3";
    /// Those of every processor with AVX-512.
    V4 "x86-64-v4";
}

choices! {
    /// The destination of the first serial port.
    Serial:
    /// The pod's log.
    #[default]
    Stdio "stdio";
    /// None.
    None "none";
}
