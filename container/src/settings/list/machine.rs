//! Variables of the machine and of the pod.

use crate::settings::variable::{Variable, variables};

pub(super) const MACHINE: &[Variable] = variables! {
    /// The type of the machine.
    translated "MACHINE" = "q35" (machine.kind);
    /// The firmware: `windows` (UEFI) or `windows_secure` (UEFI with Secure Boot and a TPM).
    /// `windows_plain`, `uefi` and `secure` are synonyms, each with its own files on the volume.
    /// The volume remembers Secure Boot until BOOT_MODE is set to another mode.
    full "BOOT_MODE" = "windows" (machine.boot): Boot;
    /// A custom firmware file.
    ignored "BIOS" = ""
        => "the firmware is built in and is always UEFI: leave it out, or set \
        BOOT_MODE=windows_secure for Secure Boot";
    /// System management mode.
    ignored "SMM" = ""
        => "Secure Boot uses it where the host has it: leave it out, and set BOOT_MODE";
    /// Adds a TPM. Defaults to Y where BOOT_MODE needs one.
    full "TPM" = "" (machine.tpm);
    /// A logo that is shown while the firmware starts.
    ignored "LOGO" = "N" => "the firmware is unchanged and shows its own logo: leave it out";
    /// Resets the firmware's variables and the TPM at every start. With EPHEMERAL, those of the
    /// volume stay as they are.
    full "CLEAR" = "N" (machine.clear);
    /// The image to boot, in related container images.
    ignored "BOOT" = "" => "set VERSION to the name of the medium, or mount it as /boot.iso";
    /// The position of the installation medium in the boot order.
    ignored "BOOT_INDEX" = "9"
        => "the medium is booted until Windows is installed on the disk: leave it out";
    /// The bus of PCI devices.
    ignored "PCI_BUS" = "pcie.0" => "devices have fixed places on the bus: leave it out";
    /// The USB controller.
    translated "USB" = "xhci" (machine.usb);
    /// The pointing device.
    translated "MOUSE" = "tablet" (machine.mouse);
    /// Provides random numbers of the host to the guest (virtio-rng).
    full "RNG" = "Y" (machine.rng);
    /// The UUID of the machine, by which activation and management tools identify it. Defaults to a
    /// random one, which is kept on the volume in `windows.uuid`.
    full "UUID" = "" (machine.uuid);
    /// The serial number of the machine, or texts of the SMBIOS tables as in QEMU's `-smbios`.
    translated "SM_BIOS" = "" (machine.smbios);
    /// Adds a high precision event timer (HPET).
    full "HPET" = "N" (machine.hpet);
    /// The I/O port of VMware.
    ignored "VMPORT" = "N" => "the machine has no such port: leave it out";
    /// The destination of the first serial port: `stdio` (the log) or `none`.
    translated "SERIAL" = "stdio" (machine.serial);
    /// The time zone of the clock, like Europe/Berlin.
    full "TZ" = "" (machine.zone);
    /// Options of QEMU's command line. Supported ones are translated. For every other one, a log
    /// message names the setting to use instead.
    translated "ARGUMENTS" = "" (machine.arguments);
};

/// Start, stop and messages of the pod.
pub(super) const POD: &[Variable] = variables! {
    /// The name of the system, in messages and on pages. In lower case, it is the prefix of its
    /// files on the volume.
    full "APP" = "Windows" (pod.app);
    /// The processor architecture of the image.
    ignored "PLATFORM" = "x64" => "this image is for x64: leave it out";
    /// The address of a support page.
    ignored "SUPPORT" = "" => "pages have no such link: leave it out";
    /// Y asks the guest to shut down when the container stops, and N switches it off. `suspend`
    /// saves the machine on the volume, and the next start continues it; where that is not possible
    /// in time, the guest is asked to shut down. `migrate` moves the running machine to another
    /// container on the same volume that waits for it, and otherwise does the same as `suspend`.
    full "SHUTDOWN" = "Y" (pod.shutdown);
    /// The TCP port at which a container with `SHUTDOWN=migrate` waits for the machine of another
    /// container. Only that container is accepted.
    full "MIGRATE_PORT" = "49152" (pod.migration.port);
    /// The time, in milliseconds, for which the guest may stand still when its machine moves. A
    /// guest that writes faster than its memory is sent is slowed, until the rest can be sent in
    /// this time.
    full "MIGRATE_PAUSE" = "300" (pod.migration.pause);
    /// The total time for stopping the container, in seconds.
    full "TIMEOUT" = "105" (pod.timeout);
    /// The former name of TIMEOUT. It takes precedence if both are set.
    full "QEMU_TIMEOUT" = "" (pod.timeout_old);
    /// Lets the machine sleep when nobody has needed it for this time, like 30m: its memory goes to
    /// the volume, and a connection, a viewer or a command wakes it. Never by default.
    full "IDLE" = "" (pod.idle);
    /// A file with a key of 32 random bytes, or with a passphrase. It encrypts the memory that
    /// `SHUTDOWN=suspend` and `transom snapshot create --memory` save. Not together with IDLE, nor
    /// with `SHUTDOWN=migrate`.
    full "SNAPSHOT_KEY_FILE" or "SNAPSHOT_KEY" = "" (pod.snapshot_key);
    /// Seconds for which a container that cannot start shows the reason at its web port before it
    /// exits. This slows down an engine that restarts it. With 0 it exits immediately.
    full "ERROR_HOLD" = "30" (pod.hold);
    /// `dockur` restores the defaults of `dockurr/windows`, many of them unsafe: a screen without a
    /// password, VNC at port 5900, any host name, and QEMU's monitor at /run/shm/monitor.sock; in a
    /// new Windows the password `admin`, no Secure Boot and TPM, no Network Level Authentication
    /// and User Account Control, no automatic updates. A changed VERSION or ISO installs anew,
    /// after a backup.
    full "COMPAT" = "none" (pod.compat);
    /// Listens for clients of QEMU's human monitor, which needs no password. Other hosts can only
    /// ask questions.
    full "MONITOR" = "" (pod.monitor);
    /// Listens for clients of QEMU's machine protocol, which needs no password. Other hosts can
    /// only ask questions.
    full "QMP" = "" (pod.qmp);
    /// The format of log messages: `text`, one line each, or `json`, for log collectors.
    full "LOG_FORMAT" = "text" (pod.format);
    /// Logs debug messages.
    full "DEBUG" = "N" (pod.debug);
    /// Logs all messages.
    full "TRACE" = "N" (pod.trace);
    /// The container engine. Podman sets this variable.
    full "container" = "" (pod.engine);
};
