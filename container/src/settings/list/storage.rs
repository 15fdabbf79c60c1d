//! Variables of the disks.

use crate::settings::variable::{Variable, variables};

pub(super) const STORAGE: &[Variable] = variables! {
    /// The folder of the volume, where all is that shall last.
    done "STORAGE" = "/storage" (storage.folder): Storage;
    /// The size of the disk; `half` and `max` are of what is free on the volume. A larger size
    /// makes an existing disk longer, a smaller one is passed over.
    done "DISK_SIZE" = "64G" (storage.size): Disk;
    /// A smaller disk than this is an error; else it depends on the version.
    done "DISK_MINIMUM" = "" (storage.minimum): Disk;
    /// The size of the second disk, which is made where /storage2 is mounted; else DISK_SIZE.
    done "DISK2_SIZE" = "" (storage.more[0]): Disk;
    /// The size of the third disk, in /storage3.
    done "DISK3_SIZE" = "" (storage.more[1]): Disk;
    /// The size of the fourth disk, in /storage4.
    done "DISK4_SIZE" = "" (storage.more[2]): Disk;
    /// The size of the fifth disk, in /storage5.
    done "DISK5_SIZE" = "" (storage.more[3]): Disk;
    /// The size of the sixth disk, in /storage6.
    done "DISK6_SIZE" = "" (storage.more[4]): Disk;
    /// A block device of the host that is the first disk.
    done "DEVICE" = "" (storage.devices[0]): Missing;
    /// A block device that is the second disk.
    done "DEVICE2" = "" (storage.devices[1]): Missing;
    /// A block device that is the third disk.
    done "DEVICE3" = "" (storage.devices[2]): Missing;
    /// A block device that is the fourth disk.
    done "DEVICE4" = "" (storage.devices[3]): Missing;
    /// A block device that is the fifth disk.
    done "DEVICE5" = "" (storage.devices[4]): Missing;
    /// A block device that is the sixth disk.
    done "DEVICE6" = "" (storage.devices[5]): Missing;
    /// The format of a disk that is made: raw or qcow2.
    done "DISK_FMT" = "" (storage.format): Disk;
    /// What the disks are connected to.
    translated "DISK_TYPE" = "scsi" (disk.controller): Disk;
    /// What the drive of the install medium is connected to.
    translated "MEDIA_TYPE" = "ide" (disk.media): Disk;
    /// How the host caches what the disks write.
    translated "DISK_CACHE" = "none" (disk.cache): Disk;
    /// How the host reads and writes.
    translated "DISK_IO" = "native" (disk.io): Disk;
    /// What the guest no longer needs is given back to the volume: unmap or ignore.
    done "DISK_DISCARD" = "unmap" (disk.discard): Disk;
    /// How fast the guest believes that its disk turns: 1 is a disk without moving parts.
    ignored "DISK_ROTATION" = "1" => "a disk is always one without moving parts: leave it out";
    /// How a qcow2 image is made.
    ignored "DISK_FLAGS" = "" => "images are made as they are fastest: leave it out";
    /// Further options of QEMU's disks.
    ignored "DISK_OPTIONS" = ""
        => "they are QEMU's: say what is needed by DISK_TYPE and DISK_CACHE";
    /// The name of the disk's file, without its end.
    done "DISK_NAME" = "data" (storage.name): Disk;
    /// PCI slots that are left free before the disks.
    ignored "DISK_OFFSET" = "0" => "disks have places of their own on the PCI bus: leave it out";
    /// The machine has no disk.
    done "DISK_DISABLE" = "N" (disk.disable);
    /// The room of a disk is taken at once.
    done "ALLOCATE" = "N" (disk.allocate);
};
