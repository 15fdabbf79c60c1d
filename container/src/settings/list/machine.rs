//! Variables of the machine and of the pod.

use crate::settings::variable::{Variable, variables};

pub(super) const MACHINE: &[Variable] = variables! {
    /// The kind of machine.
    translated "MACHINE" = "q35" (machine.kind);
    /// The firmware: `windows` (UEFI), `windows_secure` (with Secure Boot and a TPM), and uefi and
    /// secure, which are the same with files of their own on the volume. That remembers Secure Boot
    /// until another mode is said.
    done "BOOT_MODE" = "windows" (machine.boot): Boot;
    /// A firmware of one's own.
    refused "BIOS" = "": Boot
        => "the machine has UEFI firmware of its own, and no BIOS: leave it out, or say \
        BOOT_MODE=windows_secure for Secure Boot";
    /// System management mode.
    ignored "SMM" = "" => "Secure Boot does without it, and is set by BOOT_MODE: leave it out";
    /// The machine has a TPM; else as BOOT_MODE needs it.
    done "TPM" = "" (machine.tpm);
    /// A picture while the firmware starts.
    ignored "LOGO" = "N" => "the firmware is unchanged and shows its own: leave it out";
    /// The firmware forgets its settings at every start.
    done "CLEAR" = "N" (machine.clear);
    /// An image that other containers boot.
    ignored "BOOT" = "" => "name the medium by VERSION, or mount it as /boot.iso";
    /// The place of the install medium in the boot order.
    ignored "BOOT_INDEX" = "9" => "the medium is booted until the disk has Windows: leave it out";
    /// The bus of PCI devices.
    ignored "PCI_BUS" = "pcie.0" => "devices have places of their own: leave it out";
    /// The USB controller.
    translated "USB" = "qemu-xhci,id=xhci,p2=7,p3=7" (machine.usb);
    /// The pointer.
    translated "MOUSE" = "usb-tablet" (machine.mouse);
    /// The guest gets random numbers from the host.
    done "RNG" = "Y" (machine.rng);
    /// The UUID of the machine, which activation and management tools know it by; else a random one
    /// that is kept on the volume, in `windows.uuid`.
    done "UUID" = "" (machine.uuid);
    /// The serial number of the machine, or QEMU's words for what SMBIOS says.
    translated "SM_BIOS" = "" (machine.smbios);
    /// The machine has a high precision event timer.
    done "HPET" = "N" (machine.hpet);
    /// A port of VMware's.
    ignored "VMPORT" = "N" => "the machine has no such port: leave it out";
    /// The first serial port.
    translated "SERIAL" = "mon:stdio" (machine.serial);
    /// The time zone of the clock.
    done "TZ" = "" (machine.zone);
    /// Options of QEMU's command line: those that have a meaning here are translated, every other
    /// one gets a line that says what to use instead.
    translated "ARGUMENTS" = "" (machine.arguments);
};

/// Start, stop and messages of the pod.
pub(super) const POD: &[Variable] = variables! {
    /// The name of what runs, for messages and pages; in small letters, how the names of its files
    /// on the volume begin.
    done "APP" = "Windows" (pod.app);
    /// What the image was made for.
    ignored "PLATFORM" = "x64" => "this image is for x64: leave it out";
    /// Where users find help.
    ignored "SUPPORT" = "" => "pages have no such link: leave it out";
    /// The guest is asked to shut down when the pod stops.
    done "SHUTDOWN" = "Y" (pod.shutdown);
    /// Seconds that the pod has to stop, all in all.
    done "TIMEOUT" = "105" (pod.timeout);
    /// An old name of TIMEOUT, which goes over it.
    done "QEMU_TIMEOUT" = "" (pod.timeout_old);
    /// Seconds for which a pod that cannot start shows the reason at its web port before it ends,
    /// so that an engine which starts it again does so slowly; 0 ends it at once.
    done "ERROR_HOLD" = "30" (pod.hold);
    /// `dockur` brings back what the reference image does and this one holds unsafe: a screen
    /// without a password.
    done "COMPAT" = "none" (pod.compat);
    /// A monitor of QEMU's.
    refused "MONITOR" = ""
        => "whoever reaches a monitor owns the machine: use `transom` in the container, or the \
        API at the web port";
    /// A control socket of QEMU's.
    refused "QMP" = ""
        => "whoever reaches a control socket owns the machine: use `transom` in the container, \
        or the API at the web port";
    /// How messages are written: `text`, a line each, or `json`, for programs that collect them.
    done "LOG_FORMAT" = "text" (pod.format);
    /// More messages.
    done "DEBUG" = "N" (pod.debug);
    /// All messages.
    done "TRACE" = "N" (pod.trace);
    /// Which engine runs the container: Podman sets it.
    done "container" = "" (pod.engine);
};
