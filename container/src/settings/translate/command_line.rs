//! `ARGUMENTS`: parses QEMU's command line and looks up each option in the table.

use anyhow::{Context, bail, ensure};

use super::arguments::Arguments;
use super::monitor::Protocol;
use super::options::{self, Options};
use super::table::{self, Scope, Translation};
use crate::settings::value::{Value, quote};

impl Arguments {
    /// Applies an option. `word` includes its dash.
    fn take(&mut self, word: &str, value: &str) -> anyhow::Result<()> {
        let options = Options::read(value);
        let mut said = word.to_owned();
        let mut found = table::find(Scope::Option, word);
        if let Some(Translation::Scoped(scope)) = found {
            said = format!("{word} {}", quote(&options.first));
            found = table::find(scope, &options.first.to_lowercase());
        }
        match found {
            Some(Translation::Apply(take)) => take(self, &options).context(said),
            Some(Translation::BuiltIn) => Ok(()),
            Some(Translation::Refused(why)) => bail!("{said} is refused: {why}"),
            Some(Translation::Ignored(why)) => {
                self.note(format!("{said} has no effect: {why}"));
                Ok(())
            }
            _ => {
                let why = "has no effect: it has no equivalent here";
                self.note(format!("{said} {why}"));
                Ok(())
            }
        }
    }
}

/// The name of an option with one dash. QEMU accepts two dashes as well. Nothing if the word is no
/// option.
fn option(word: &str) -> Option<String> {
    let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
    name.starts_with(|first: char| first.is_ascii_alphabetic()).then(|| format!("-{name}"))
}

impl Value for Arguments {
    const ACCEPTS: &'static str = "options of QEMU";
    const SHOWN: bool = false;

    fn read(text: &str) -> anyhow::Result<Self> {
        let mut arguments = Self::default();
        let mut words = options::split(text)?.into_iter().peekable();
        while let Some(word) = words.next() {
            let Some(name) = option(&word) else {
                ensure!(
                    !word.starts_with('-'),
                    "{} is not an option of QEMU: leave it out",
                    quote(&word)
                );
                // QEMU takes a word without a dash for a disk image. Here it is more likely a
                // mistake.
                arguments.note(format!("{} has no effect: no option precedes it", quote(&word)));
                continue;
            };
            // A switch takes no value, and a value does not start like an option.
            let switch = table::is_switch(&name);
            let value = words.next_if(|next| !switch && option(next).is_none());
            arguments.take(&quote(&name), &value.unwrap_or_default())?;
        }
        for drive in arguments.drives.extract_if(.., |drive| !drive.used) {
            let sentence = "has no effect: no -device refers to it";
            arguments.notes.push(format!("-drive {} {sentence}", drive.path.show()));
        }
        Ok(arguments)
    }
    fn show(&self) -> String {
        let mut said = Vec::new();
        let smbios = self.smbios.show();
        if !smbios.is_empty() {
            said.push(format!("SMBIOS {smbios}"));
        }
        said.extend(self.files.iter().map(|(name, _)| format!("file {name}")));
        said.extend(self.drives.iter().map(|drive| {
            let kind = if drive.cdrom { "CD" } else { "disk" };
            format!("{kind} {} at {}", drive.path.show(), drive.bus.show())
        }));
        said.extend(self.usb.iter().map(|device| format!("USB device {device}")));
        said.extend(self.utc.then(|| "clock in UTC".to_owned()));
        said.extend(self.prealloc.then(|| "memory at once".to_owned()));
        said.extend(self.monitors.iter().map(|(protocol, place)| {
            let name = if *protocol == Protocol::Qmp { "QMP" } else { "monitor" };
            format!("{name} at {}", place.show())
        }));
        if said.is_empty() { "nothing".into() } else { said.join("; ") }
    }
    fn notes(&self) -> Vec<String> {
        self.notes.iter().chain(&self.smbios.notes).cloned().collect()
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::Format;

    fn read(text: &str) -> Arguments {
        Arguments::read(text).unwrap()
    }

    fn refusal(text: &str) -> String {
        format!("{:#}", Arguments::read(text).unwrap_err())
    }

    #[test]
    fn supported_arguments_are_translated() {
        let arguments = read(
            "-drive file=/a,,b.qcow2,format=qcow2,id=x,if=none -device virtio-blk-pci,drive=x \
             -cdrom /c.iso --rtc base=utc -smbios type=1,serial='A B' -device virtio-rng-pci \
             -fw_cfg name=opt/x,string=hush -mem-prealloc -name whatever",
        );
        assert_eq!(
            arguments.show(),
            "SMBIOS serial=A B; file opt/x; disk /a,b.qcow2 at blk; CD /c.iso at ide; clock in \
             UTC; memory at once"
        );
        assert_eq!(arguments.notes(), [""; 0]);
        assert_eq!(arguments.drives[0].format, Some(Format::Qcow2));
        assert!(!format!("{arguments:?}").contains("hush"));
    }

    #[test]
    fn a_drive_without_a_device_is_reported() {
        let arguments = read("-drive file=/a.img,id=x,if=none");
        assert_eq!(arguments.drives, []);
        assert!(arguments.notes()[0].contains("/a.img"));
        assert!(refusal("-device nvme,drive=y").contains("the drive y does not exist"));
    }

    #[test]
    fn other_remote_control_interfaces_are_not_opened() {
        for text in [
            "-qmp tcp:0.0.0.0:7149",
            "-monitor stdio",
            "-mon chardev=x",
            "-chardev pty,id=x",
            "-vnc :0",
            "-gdb tcp::1234",
            "-s",
        ] {
            let arguments = read(text);
            let [note] = &arguments.notes()[..] else { panic!("{text}: {arguments:?}") };
            assert!(note.contains(" has no effect: "), "{text}: {note}");
            assert_eq!(arguments.show(), "nothing");
        }
    }

    #[test]
    fn control_protocols_of_qemu_are_listened_for() {
        let arguments = read(
            "--qmp unix:/x,server -monitor telnet:127.0.0.1:7100,server,nowait -chardev \
             socket,id=m,host=127.0.0.1,port=4444,server=on,wait=off -mon chardev=m,mode=control \
             -chardev socket,id=h,path=/h,server=on -mon h",
        );
        assert_eq!(
            arguments.show(),
            "QMP at unix:/x; monitor at tcp:127.0.0.1:7100; QMP at tcp:127.0.0.1:4444; monitor at \
             unix:/h"
        );
        assert_eq!(arguments.notes(), [""; 0]);
        let exposed = read("-qmp tcp:0.0.0.0:7149,server,wait=off");
        let [note] = &exposed.notes()[..] else { panic!("{exposed:?}") };
        assert!(note.starts_with("-qmp: tcp:0.0.0.0:7149 can be reached by other hosts"), "{note}");
        assert!(refusal(&"-qmp unix:/x,server ".repeat(9)).contains("at most 8"));
    }

    #[test]
    fn usb_devices_of_the_host_are_given_as_for_qemu() {
        let arguments = read(
            "-device usb-host,vendorid=0x0403,productid=24577,id=a -device \
             usb-host,hostbus=1,hostport=1.4,bus=xhci.0 -device \
             usb-host,hostdevice=/dev/bus/usb/002/013",
        );
        let devices =
            ["vendorid=0x0403,productid=0x6001", "hostbus=1,hostport=1.4", "hostbus=2,hostaddr=13"];
        assert_eq!(
            (arguments.usb.as_slice(), arguments.notes()),
            (&devices.map(String::from)[..], Vec::new())
        );
        for (text, reason) in [
            ("", "needs vendorid="),
            (",vendorid=0x10000", "vendorid=0x10000: write a number"),
            (",hostbus=1,hostport=1..2", "as in 1.4"),
            (",hostbus=1", "needs vendorid="),
            (",hostdevice=/dev/sda", "/dev/bus/usb/001/004"),
        ] {
            let refusal = refusal(&format!("-device usb-host{text}"));
            assert!(refusal.contains(reason), "{refusal}");
        }
        assert!(refusal(&"-device usb-host,vendorid=1 ".repeat(16)).contains("at most 15"));
    }

    #[test]
    fn arguments_that_endanger_data_are_refused() {
        for text in ["-snapshot", "-incoming tcp:0:4444"] {
            let refusal = refusal(text);
            assert!(refusal.contains("is refused: ") && refusal.contains("use "), "{refusal}");
        }
    }

    #[test]
    fn arguments_that_only_qemu_knows_are_noted() {
        for text in [
            "-drive file=/x,if=pflash",
            "-drive file=/x,if=floppy",
            "-rtc base=2020-01-01",
            "-fw_cfg name=etc/x,string=1",
        ] {
            let arguments = read(text);
            let [note] = &arguments.notes()[..] else { panic!("{text}: {arguments:?}") };
            assert!(note.contains(" has no effect: "), "{text}: {note}");
            assert_eq!(arguments.show(), "nothing");
        }
    }

    #[test]
    fn unknown_options_are_reported_without_their_values() {
        let arguments = read("-zzz secret -device qxl,x=secret -object secret,data=hush word");
        let notes = arguments.notes().join("\n");
        for said in ["-zzz", "-device qxl", "-object secret", "word"] {
            assert!(notes.contains(said), "{said} in {notes}");
        }
        assert!(!notes.contains("hush") && !notes.contains("zzz secret"), "{notes}");
    }

    #[test]
    fn refuses_invalid_arguments() {
        for bad in [
            "-drive id=x",
            "-drive file=relative",
            "-drive file=/x,format=vmdk",
            "-uuid 1",
            "-fw_cfg name=opt/x",
            "-name 'open",
            "-",
            "--",
        ] {
            assert!(!refusal(bad).is_empty(), "{bad}");
        }
    }
}
