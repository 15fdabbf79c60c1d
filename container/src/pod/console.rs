//! Splits the serial port's output into lines, and recognizes boot events of the firmware.

use std::collections::VecDeque;

/// Number of lines that the error shows if nothing boots.
const MAX_LAST_LINES: usize = 12;
/// Maximum bytes of a line. A guest may send lines of any length.
const MAX_LENGTH: usize = 1000;

/// A boot event, as EDK2 reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BootEvent {
    Starts {
        name: String,
        on: BootDevice,
    },
    /// The firmware found nothing to boot, or only its shell.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootDevice {
    Disk,
    /// A CD.
    Medium,
    /// A network, or the firmware itself, such as its menus.
    Other,
}

#[derive(Default)]
pub struct Console {
    line: Vec<u8>,
    last: VecDeque<String>,
}

impl Console {
    /// Takes bytes and returns the lines they complete, without terminal control sequences.
    pub fn take(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for byte in bytes {
            if *byte == b'\n' || *byte == b'\r' || self.line.len() >= MAX_LENGTH {
                let line = plain(&String::from_utf8_lossy(&self.line));
                self.line.clear();
                if !line.is_empty() {
                    lines.push(line);
                }
            }
            if *byte != b'\n' && *byte != b'\r' {
                self.line.push(*byte);
            }
        }
        for line in &lines {
            if self.last.len() == MAX_LAST_LINES {
                self.last.pop_front();
            }
            self.last.push_back(line.clone());
        }
        lines
    }

    /// The last lines, joined.
    pub fn last(&self) -> String {
        let last: Vec<&str> = self.last.iter().map(String::as_str).collect();
        last.join("\n")
    }
}

/// Maximum characters of a boot entry's name.
const MAX_NAME: usize = 64;

/// Reads a line of EDK2's boot device selection.
pub fn boot_event(line: &str) -> Option<BootEvent> {
    let said = line.strip_prefix("BdsDxe: ")?;
    if said.starts_with("No bootable option") {
        return Some(BootEvent::Nothing);
    }
    let rest = said.strip_prefix("starting Boot")?;
    let (_, rest) = rest.split_once('"')?;
    let (name, place) = rest.rsplit_once("\" from ")?;
    if name.contains("Shell") && place.starts_with("Fv(") {
        return Some(BootEvent::Nothing);
    }
    // Any program in the guest can write this line, and the page shows the name to everybody.
    let shown = name.chars().take(MAX_NAME).collect();
    Some(BootEvent::Starts { name: shown, on: on(name, place) })
}

/// The kind of device of a boot entry. Entries made by an operating system name a partition.
/// Entries made by the firmware name only the device, which may be a CD drive or a network.
fn on(name: &str, place: &str) -> BootDevice {
    let has = |words: &[&str]| words.iter().any(|it| place.contains(it));
    let drive = ["CD-ROM", "DVD"].iter().any(|it| name.contains(it));
    match () {
        () if place.contains("HD(") => BootDevice::Disk,
        () if has(&["Fv(", "MAC(", "Uri("]) => BootDevice::Other,
        () if drive || place.contains("CDROM(") => BootDevice::Medium,
        () => BootDevice::Disk,
    }
}

/// Removes control sequences and control characters.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            // ECMA-48: a control sequence ends with a letter or one of a few other characters.
            '\x1b' if letters.next_if_eq(&'[').is_some() => {
                while letters.next().is_some_and(|it| !('@'..='~').contains(&it)) {}
            }
            '\x1b' => drop(letters.next()),
            '\t' => out.push(' '),
            letter if letter.is_control() => {}
            letter => out.push(letter),
        }
    }
    out.trim_end().to_owned()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn console_lines_are_complete_and_without_control_characters() {
        let mut console = Console::default();
        assert!(console.take(b"\x1b[2J\x1b[01;01Hone").is_empty());
        assert_eq!(console.take(b" two\r\nthree\x07\n\n"), ["one two", "three"]);
        let long = console.take(&[b'x'; 2500]);
        assert_eq!(long.iter().map(String::len).collect::<Vec<_>>(), [1000, 1000]);
        assert_eq!(console.take(b"\n"), ["x".repeat(500)]);
        assert_eq!(console.last().lines().count(), 5);
        assert_eq!(console.take(b"\x1b[31"), Vec::<String>::new());
        assert_eq!(console.take(b"\n\x1b"), Vec::<String>::new());
    }

    #[test]
    fn firmware_lines_become_boot_events() {
        let starts = |name: &str, on| Some(BootEvent::Starts { name: name.into(), on });
        for (line, said) in [
            (
                "BdsDxe: starting Boot0004 \"Windows Boot Manager\" from HD(1,GPT,7B1C)/\\EFI\\\
                 Microsoft\\Boot\\bootmgfw.efi",
                starts("Windows Boot Manager", BootDevice::Disk),
            ),
            (
                "BdsDxe: starting Boot0001 \"UEFI QEMU DVD-ROM QM00003 \" from PciRoot(0x0)/\
                 Pci(0x1F,0x2)/Sata(0x1,0xFFFF,0x0)",
                starts("UEFI QEMU DVD-ROM QM00003 ", BootDevice::Medium),
            ),
            (
                "BdsDxe: starting Boot0001 \"UEFI Transom USB CD-ROM 1 \" from PciRoot(0x0)/\
                 Pci(0x2,0x0)/USB(0x4,0x0)",
                starts("UEFI Transom USB CD-ROM 1 ", BootDevice::Medium),
            ),
            (
                "BdsDxe: starting Boot0001 \"UEFI TRANSOM SCSI disk \" from PciRoot(0x0)/\
                 Pci(0x3,0x0)/Scsi(0x0,0x0)",
                starts("UEFI TRANSOM SCSI disk ", BootDevice::Disk),
            ),
            (
                "BdsDxe: starting Boot0003 \"UEFI PXEv4 (MAC:525400000001)\" from PciRoot(0x0)/\
                 Pci(0x4,0x0)/MAC(525400000001,0x1)/IPv4(0.0.0.0)",
                starts("UEFI PXEv4 (MAC:525400000001)", BootDevice::Other),
            ),
            (
                "BdsDxe: starting Boot0000 \"UiApp\" from Fv(7CB8BDC9)/FvFile(462C)",
                starts("UiApp", BootDevice::Other),
            ),
            ("BdsDxe: loading Boot0001 \"x\" from HD(1)", None),
            (
                "BdsDxe: starting Boot0000 \"EFI Internal Shell\" from Fv(7CB8BDC9)/FvFile(7C04)",
                Some(BootEvent::Nothing),
            ),
            ("BdsDxe: No bootable option or device was found.", Some(BootEvent::Nothing)),
            ("BdsDxe: starting Boot", None),
            ("Linux version 6.1.0", None),
        ] {
            assert_eq!(boot_event(line), said, "{line}");
        }
    }
}
