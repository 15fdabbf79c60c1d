//! What kind of image a file is, by its first bytes, and what is to be done with such a one.
//!
//! Threats: what stands in a raw disk is the guest's. It may write a qcow2 header there, with any
//! file of the host as backing file, and wait for the next start. So the bytes never choose the
//! format: the configuration does, or else the file's name. The bytes only ever lead to a refusal.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::bail;
use serde::{Deserialize, Serialize};

/// How the disk lies in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// As it is.
    Raw,
    /// QEMU's, with clusters that are allocated as they are written, and perhaps a backing file.
    Qcow2,
}

/// `QFI\xfb`
pub(super) const QCOW2: &[u8] = b"QFI\xfb";

/// Where which bytes are, and whose they are.
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
const LONGEST: usize = 0x44;

/// The format that was asked for, or that the name tells; refuses a file that is evidently not so.
///
/// # Errors
///
/// With a way out.
pub(super) fn choose(wanted: Option<Format>, path: &Path, file: &File) -> anyhow::Result<Format> {
    let named = path.extension().is_some_and(|it| it.eq_ignore_ascii_case("qcow2"));
    let format = wanted.unwrap_or(if named { Format::Qcow2 } else { Format::Raw });
    let mut head = [0; LONGEST];
    // What cannot be read, or is shorter, has nothing to tell.
    let length = file.read_at(&mut head, 0).unwrap_or_default();
    let found = FOREIGN.iter().find(|(at, magic, ..)| {
        head[..length].get(*at..).is_some_and(|bytes| bytes.starts_with(magic))
    });
    let name = path.display();
    match (format, wanted, found) {
        // Whoever says raw means raw: it may be the guest who wrote what is there.
        (Format::Raw, Some(_), _) | (Format::Raw, None, None) => {}
        (Format::Qcow2, _, Some((_, magic, ..))) if *magic == QCOW2 => {}
        (Format::Raw, None, Some((_, magic, ..))) if *magic == QCOW2 => bail!(
            "{name} begins like a qcow2 image: say `format=qcow2` if it is one, or `format=raw` \
             if its guest may have written that"
        ),
        (_, _, Some((_, _, what, kind))) => bail!(
            "{name} is {what}, which is not read here: `qemu-img convert -f {kind} -O raw {name} \
             disk.raw` makes a disk of it"
        ),
        (Format::Qcow2, Some(_), None) => {
            bail!("{name} is not a qcow2 image: leave `format=qcow2` out if it is a raw one")
        }
        (Format::Qcow2, None, None) => {
            bail!("{name} is not a qcow2 image, despite its name: say `format=raw` if it is raw")
        }
    }
    Ok(format)
}
