//! Names of PCI functions for the page.

/// The display on which the page is shown.
pub(crate) const DISPLAY: &str = "1234:1111";

const IDS: &[(&str, &str)] = &[
    ("8086:29c0", "Host bridge, Q35"),
    ("8086:2918", "LPC bridge, ICH9"),
    ("8086:2922", "SATA controller, ICH9"),
    ("8086:2930", "SMBus, ICH9"),
    (DISPLAY, "Display"),
    ("1234:11e8", "Educational device"),
    ("1af4:1000", "Network, virtio"),
    ("1af4:1001", "Disk, virtio"),
    ("1af4:1041", "Network, virtio"),
    ("1af4:1042", "Disk, virtio"),
    ("1af4:1043", "Console, virtio"),
    ("1af4:1044", "Random numbers, virtio"),
    ("1af4:1045", "Memory balloon, virtio"),
    ("1af4:1048", "SCSI disks, virtio"),
    ("1af4:1052", "Input, virtio"),
    ("1af4:1053", "Socket, virtio"),
    ("1af4:105a", "Shared folder, virtio"),
];

/// Names by class, subclass and interface: value, mask, name.
const CLASSES: &[(u64, u64, &str)] = &[
    (0x01_0802, 0xff_ffff, "Disk, NVMe"),
    (0x01_0600, 0xff_ff00, "SATA controller"),
    (0x01_0000, 0xff_0000, "Disk controller"),
    (0x02_0000, 0xff_0000, "Network"),
    (0x03_0000, 0xff_0000, "Display"),
    (0x04_0000, 0xff_0000, "Sound"),
    (0x06_0000, 0xff_ff00, "Host bridge"),
    (0x06_0100, 0xff_ff00, "ISA bridge"),
    (0x06_0400, 0xff_ff00, "PCI bridge"),
    (0x0c_0330, 0xff_ffff, "USB controller, xHCI"),
    (0x0c_0300, 0xff_ff00, "USB controller"),
    (0x0c_0500, 0xff_ff00, "SMBus"),
];

pub(crate) fn name(id: &str, class: u64) -> &'static str {
    let known = IDS.iter().find(|(known, _)| *known == id).map(|(_, name)| *name);
    let of_class = || {
        let mut fitting = CLASSES.iter().filter(|(value, mask, _)| class & mask == *value);
        fitting.next().map(|(_, _, name)| *name)
    };
    known.or_else(of_class).unwrap_or("Device")
}
