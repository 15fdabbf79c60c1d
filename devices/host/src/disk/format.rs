//! Chooses the format of an image, and recognizes foreign images by their first bytes.
//!
//! Threats: the guest controls the content of a raw disk. It may write a qcow2 header there, with
//! any file of the host as backing file, and wait for the next start. So the content never chooses
//! the format: the configuration does, or else the file's name. The content only leads to refusals.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::bail;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The bytes of the disk, without a header.
    Raw,
    /// QEMU's format, which allocates clusters when they are written and may have a backing file.
    Qcow2,
}

impl Format {
    /// The format of an image with this name.
    pub(super) fn of_name(path: &Path) -> Self {
        match path.extension().is_some_and(|it| it.eq_ignore_ascii_case("qcow2")) {
            true => Self::Qcow2,
            false => Self::Raw,
        }
    }

    /// The name in `qemu-img`, and in images over such a base.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

pub(super) const QCOW2: &[u8] = b"QFI\xfb";

/// Known images: offset, magic bytes, description, name of the format in `qemu-img`.
const FOREIGN: &[(usize, &[u8], &str, &str)] = &[
    (0, b"KDMV", "a VMware image", "vmdk"),
    (0, b"COWD", "a VMware image", "vmdk"),
    (0, b"# Disk DescriptorFile", "a VMware image's description", "vmdk"),
    (0, b"vhdxfile", "a Hyper-V image", "vhdx"),
    (0, b"conectix", "a Virtual PC image", "vpc"),
    (0x40, &[0x7f, 0x10, 0xda, 0xbe], "a VirtualBox image", "vdi"),
    (0, b"QED\0", "a QED image", "qed"),
    (0, QCOW2, "a qcow2 image", "qcow2"),
];
/// Bytes of a file that are compared with `FOREIGN`.
const HEAD_BYTES: usize = 0x44;

/// Returns the configured format, or else the one of the file's name. Refuses content that
/// contradicts the format, and without a configured format all content of `FOREIGN`.
pub(super) fn choose(wanted: Option<Format>, path: &Path, file: &File) -> anyhow::Result<Format> {
    let format = wanted.unwrap_or_else(|| Format::of_name(path));
    let mut head = [0; HEAD_BYTES];
    // A shorter or unreadable file is compared with the bytes that were read.
    let length = file.read_at(&mut head, 0).unwrap_or_default();
    let found = FOREIGN.iter().find(|(at, magic, ..)| {
        head[..length].get(*at..).is_some_and(|bytes| bytes.starts_with(magic))
    });
    let name = path.display();
    match (format, wanted, found) {
        // An explicit `raw` is final: the guest may have written the magic bytes.
        (Format::Raw, Some(_), _) | (Format::Raw, None, None) => {}
        (Format::Qcow2, _, Some((_, magic, ..))) if *magic == QCOW2 => {}
        (Format::Raw, None, Some((_, magic, ..))) if *magic == QCOW2 => bail!(
            "{name} begins like a qcow2 image: set `format=qcow2` if it is one, or `format=raw` \
             if its guest may have written these bytes"
        ),
        (_, _, Some((_, _, what, kind))) => bail!(
            "{name} is {what}, which is not supported: convert it with `qemu-img convert -f {kind} \
             -O raw {name} disk.raw`"
        ),
        (Format::Qcow2, Some(_), None) => {
            bail!("{name} is not a qcow2 image: leave `format=qcow2` out if it is a raw image")
        }
        (Format::Qcow2, None, None) => {
            bail!("{name} is not a qcow2 image, despite its name: set `format=raw` if it is raw")
        }
    }
    Ok(format)
}
