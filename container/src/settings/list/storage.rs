//! Variables of the disks.

use crate::settings::variable::{Variable, variables};

pub(super) const STORAGE: &[Variable] = variables! {
    /// The folder of the volume, which keeps all persistent data.
    full "STORAGE" = "/storage" (storage.folder): Storage;
    /// The size of the first disk: a size, or `half` or `max` of the free space on the volume. An
    /// existing disk grows to a larger size. A smaller size is ignored.
    full "DISK_SIZE" = "64G" (storage.size): Disk;
    /// The minimum size of the disk. A smaller one is an error. The default depends on the version.
    full "DISK_MINIMUM" = "" (storage.minimum): Disk;
    /// The size of the second disk, which exists if /storage2 is mounted. Defaults to DISK_SIZE.
    full "DISK2_SIZE" = "" (storage.more[0]): Disk;
    /// The size of the third disk, in /storage3.
    full "DISK3_SIZE" = "" (storage.more[1]): Disk;
    /// The size of the fourth disk, in /storage4.
    full "DISK4_SIZE" = "" (storage.more[2]): Disk;
    /// The size of the fifth disk, in /storage5.
    full "DISK5_SIZE" = "" (storage.more[3]): Disk;
    /// The size of the sixth disk, in /storage6.
    full "DISK6_SIZE" = "" (storage.more[4]): Disk;
    /// A block device of the host to use as the first disk.
    full "DEVICE" = "" (storage.devices[0]): Missing;
    /// A block device to use as the second disk.
    full "DEVICE2" = "" (storage.devices[1]): Missing;
    /// A block device to use as the third disk.
    full "DEVICE3" = "" (storage.devices[2]): Missing;
    /// A block device to use as the fourth disk.
    full "DEVICE4" = "" (storage.devices[3]): Missing;
    /// A block device to use as the fifth disk.
    full "DEVICE5" = "" (storage.devices[4]): Missing;
    /// A block device to use as the sixth disk.
    full "DEVICE6" = "" (storage.devices[5]): Missing;
    /// The format of new disk images: raw (the default) or qcow2. A disk over BASE is qcow2.
    full "DISK_FMT" = "" (storage.format): Disk;
    /// The controller of the disks.
    translated "DISK_TYPE" = "scsi" (disk.controller): Disk;
    /// The controller of the installation medium's drive.
    translated "MEDIA_TYPE" = "ide" (disk.media): Disk;
    /// The cache mode of the host. `unsafe` is taken as `writeback`: flushes of the guest are never
    /// ignored.
    translated "DISK_CACHE" = "none" (disk.cache): Disk;
    /// The I/O engine of the host.
    translated "DISK_IO" = "native" (disk.io): Disk;
    /// Whether space that the guest discards is freed on the volume: unmap or ignore.
    full "DISK_DISCARD" = "unmap" (disk.discard): Disk;
    /// The rotation rate that disks report. 1 means an SSD.
    ignored "DISK_ROTATION" = "1" => "disks always report that they do not rotate: leave it out";
    /// Options for new qcow2 images.
    ignored "DISK_FLAGS" = "" => "images are created with the fastest options: leave it out";
    /// Further options of QEMU's disks.
    ignored "DISK_OPTIONS" = ""
        => "these options exist in QEMU only: set DISK_TYPE and DISK_CACHE instead";
    /// The name of the disk's file, without extension.
    full "DISK_NAME" = "data" (storage.name): Disk;
    /// The number of PCI slots to leave free before the disks.
    ignored "DISK_OFFSET" = "0" => "disks have fixed places on the PCI bus: leave it out";
    /// An image, or the folder of an installed machine, that the first disk starts from. It is only
    /// read: the volume keeps what the guest changes, as data.qcow2. Many machines can share it.
    /// From the folder of a snapshot with memory, the machine goes on, instead of booting.
    full "BASE" = "" (storage.base): Missing;
    /// Throws away at the stop what the guest has written to its disks, its firmware and its TPM.
    full "EPHEMERAL" = "N" (disk.ephemeral);
    /// Runs the machine without its disks, as from a rescue CD. They stay as they are.
    full "DISK_DISABLE" = "N" (disk.disable);
    /// Allocates the whole disk when it is created.
    full "ALLOCATE" = "N" (disk.allocate);
};
