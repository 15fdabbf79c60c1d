//! Sample machines for the tests: a small one, a large one with many devices, and one with a TPM.

use boot::acpi::{self, Cpu, Node, Platform, Tables};
use boot::file::File;
use boot::layout::{self, Ram};
use boot::smbios::{Processors, Smbios};

const MIB: u64 = 1 << 20;

/// A description of a machine.
pub(crate) struct Sample {
    /// The prefix of the names of its golden files.
    pub(crate) name: &'static str,
    /// Its RAM.
    pub(crate) ram: Ram,
    /// For ACPI.
    pub(crate) platform: Platform,
    /// For SMBIOS.
    pub(crate) smbios: Smbios,
}

impl Sample {
    /// Its tables.
    pub(crate) fn tables(&self) -> Tables {
        acpi::tables(&self.platform).unwrap()
    }

    /// The files that firmware gets for them.
    pub(crate) fn files(&self) -> Vec<File> {
        let mut files = self.tables().files().to_vec();
        if self.has_tpm() {
            files.push(acpi::event_log());
        }
        files
    }

    pub(crate) fn has_tpm(&self) -> bool {
        self.platform.nodes.iter().any(|node| node.hid == acpi::TPM)
    }
}

/// One processor and 256 MiB, under firmware of 2022; eight processors, 5 GiB and an HPET, under
/// firmware of 2025; the first with a TPM.
pub(crate) fn samples() -> [Sample; 3] {
    let mut large = sample("8cpu-5g-hpet", 8, 5120 * MIB, &layout::PCIEXBAR);
    large.platform.nodes.push(Node {
        hid: "PNP0103".into(),
        memory: vec![layout::HPET],
        lines: vec![2, 8],
        ..Node::default()
    });
    large.platform.nodes.push(isa("PNP0501", 0x2F8..0x300, &[3]));
    let small = |name| sample(name, 1, 256 * MIB, &(0xB000_0000..0xC000_0000));
    let mut trusted = small("1cpu-256m-tpm");
    trusted.platform.nodes.push(Node {
        hid: acpi::TPM.into(),
        memory: vec![0xFED4_0000..0xFED4_1000, 0xFED4_5000..0xFED4_5400],
        ..Node::default()
    });
    [small("1cpu-256m"), large, trusted]
}

fn sample(name: &'static str, cpus: u16, memory: u64, pcie: &std::ops::Range<u64>) -> Sample {
    let ram = Ram::new(memory);
    let platform = Platform {
        cpus: (0..cpus.into()).map(|apic_id| Cpu { apic_id }).collect(),
        pcie: pcie.clone(),
        windows: layout::pci_windows(ram, pcie),
        window64: layout::pci_window64(ram, 46),
        pm_base: 0x600,
        nodes: nodes(),
        generation_id: *b"\xF0\xE1\xD2\xC3\xB4\xA5\x96\x87\x78\x69\x5A\x4B\x3C\x2D\x1E\x0F",
    };
    let smbios = Smbios {
        manufacturer: "Transom".into(),
        product: "Q35".into(),
        version: "1".into(),
        serial: String::new(),
        uuid: *b"\x01\x23\x45\x67\x89\xAB\xCD\xEF\x01\x23\x45\x67\x89\xAB\xCD\xEF",
        processors: Processors {
            sockets: 1,
            cores: cpus.div_ceil(2),
            threads: cpus.min(2),
            vendor: "GenuineIntel".into(),
            model: "A processor".into(),
            signature: 0x1789_FBFF_000A_0652,
        },
        memory: ram.ranges(),
    };
    Sample { name, ram, platform, smbios }
}

fn nodes() -> Vec<Node> {
    vec![
        isa("PNP0501", 0x3F8..0x400, &[4]),
        isa("PNP0B00", 0x70..0x72, &[8]),
        Node {
            hid: "PNP0303".into(),
            ports: vec![0x60..0x61, 0x64..0x65],
            lines: vec![1],
            memory: vec![],
        },
        Node { hid: "PNP0F13".into(), lines: vec![12], ..Node::default() },
        isa("QEMU0002", 0x510..0x51C, &[]),
    ]
}

fn isa(hid: &str, ports: std::ops::Range<u16>, lines: &[u32]) -> Node {
    Node { hid: hid.into(), ports: vec![ports], lines: lines.into(), memory: vec![] }
}
