//! QEMU's words, and what they become here.
//!
//! `table` is the one list: which words, at which place, and what they are here, or the sentence
//! why they are not and what to use instead.

pub mod arguments;
mod command_line;
pub mod flags;
pub mod options;
pub mod smbios;
pub mod table;
mod topology;

use anyhow::bail;

pub use self::topology::Topology;

use self::options::Options;
use self::table::{Becomes, Place};
use super::value::{Value, choices, quote};

/// A closed set of things that QEMU has words for.
pub trait Spoken: Value + Default + PartialEq {
    /// Where its words stand in the table.
    const PLACE: Place;
    /// Whether a word that nobody knows is an error; else it is what it is if nothing is said.
    const STRICT: bool = false;
}

/// A thing of ours, said in QEMU's words.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Words<T> {
    /// What it is.
    pub is: T,
    /// What of the words has no meaning here.
    pub notes: Vec<String>,
}

impl<T: Spoken> Value for Words<T> {
    const ACCEPTS: &'static str = T::ACCEPTS;

    fn read(text: &str) -> anyhow::Result<Self> {
        let options = Options::read(text);
        let word = options.first.to_lowercase();
        let mut notes = Vec::new();
        let is = match table::find(T::PLACE, &word) {
            Some(Becomes::Is(own)) => T::read(own)?,
            Some(Becomes::Near(own, why)) => {
                notes.push(format!("{} is not there, {own} is taken: {why}", quote(&word)));
                T::read(own)?
            }
            Some(Becomes::Never(why)) => bail!("{why}"),
            _ if T::STRICT => bail!("give one of: {}", T::ACCEPTS),
            Some(Becomes::Not(why)) => {
                notes.push(format!("{} has no effect: {why}", quote(&word)));
                T::default()
            }
            _ => {
                let (own, all) = (T::default().show(), T::ACCEPTS);
                notes.push(format!("{} is not known, {own} is taken: give {all}", quote(&word)));
                T::default()
            }
        };
        notes.extend(options.without_meaning());
        Ok(Self { is, notes })
    }
    fn show(&self) -> String {
        self.is.show()
    }
    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

/// Sets of things, each at its place of the table.
macro_rules! spoken {
    ($($name:ident at $place:ident $($strict:ident)?;)+) => {$(
        impl Spoken for $name {
            const PLACE: Place = Place::$place;
            $(const STRICT: bool = spoken!(@$strict);)?
        }
    )+};
    (@strict) => { true };
}

spoken! {
    Bus at Bus strict;
    Cache at Cache strict;
    Engine at Engine strict;
    Adapter at Adapter;
    Screen at Screen;
    Display at Display;
    Kind at Kind;
    Usb at Usb;
    Pointer at Pointer;
    Model at Model;
    Serial at Serial;
}

choices! {
    /// What a disk is connected to.
    Bus:
    /// The best for what the guest has drivers for.
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
    /// A stick at USB.
    Usb "usb";
    /// There is none.
    None "none";
}

choices! {
    /// How the host caches a disk.
    Cache:
    /// Around its page cache.
    #[default]
    Direct "none";
    /// In its page cache.
    Writeback "writeback";
    /// In memory, until it is convenient.
    Unsafe "unsafe";
}

choices! {
    /// How the host reads and writes.
    Engine:
    /// As it is fastest.
    #[default]
    Native "native";
}

choices! {
    /// The guest's network card.
    Adapter:
    /// virtio-net.
    #[default]
    Virtio "virtio";
}

choices! {
    /// The guest's display.
    Screen:
    /// The one that firmware and Windows have drivers for.
    #[default]
    Standard "std";
    /// None.
    None "none";
}

choices! {
    /// Where the screen is seen.
    Display:
    /// In browsers and by VNC.
    #[default]
    Web "web";
    /// By VNC.
    Vnc "vnc";
    /// Nowhere, and the guest has a display all the same.
    Disabled "disabled";
    /// Nowhere, and the guest has no display.
    None "none";
}

choices! {
    /// The kind of machine.
    Kind:
    /// Intel's Q35.
    #[default]
    Q35 "q35";
}

choices! {
    /// The USB controller.
    Usb:
    /// USB 3.
    #[default]
    Xhci "xhci";
}

choices! {
    /// The pointer.
    Pointer:
    /// One that says where it is.
    #[default]
    Tablet "tablet";
}

choices! {
    /// The model of the processors.
    Model:
    /// The host's.
    #[default]
    Host "host";
}

choices! {
    /// The first serial port.
    Serial:
    /// What the guest says is a message of the pod.
    #[default]
    Stdio "stdio";
    /// Nowhere.
    None "none";
}
