//! What the environment says, with types.
//!
//! `list` has a line for every variable: its name, its default, its place here and its meaning. The
//! type of the place is the parser; `environment` reads all lines, and `settle` makes out of it,
//! with what the host has, how large the machine is.

pub mod balloon;
pub mod environment;
pub mod host;
pub mod language;
pub mod list;
pub(crate) mod near;
pub mod settle;
pub mod translate;
pub mod trust;
pub mod value;
pub mod variable;
pub mod version;
pub mod words;

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use ::host::mac::Mac;
use ::host::size::Size;
use ::host::uuid::Uuid;
use screen::web::stage::{Layout, LayoutName};

use self::language::{Culture, Keyboard, Language};
use self::translate::arguments::Arguments;
use self::translate::flags::Flags;
use self::translate::smbios::Smbios;
use self::translate::{
    Adapter, Bus, Cache, Display, Engine, Kind, Model, Pointer, Screen, Serial, Topology, Usb,
    Words,
};
use self::trust::{Origins, Proxies};
use self::value::{Cores, Disk, Port, Ram, Secret, Value, Within, choices, switch};
use self::version::Version;
use self::words::{
    Domain, Edition, FileName, HostName, Interface, Mask, Ports, ProductKey, UserName, Workgroup,
    Zone,
};

/// Where VNC viewers look (RFC 6143 9).
const VNC_PORT: u16 = 5900;

/// All settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Which Windows, and how it is set up.
    pub windows: Windows,
    /// Who uses it, and what it is called.
    pub account: Account,
    /// Where Windows comes from.
    pub media: Media,
    /// Processors.
    pub processor: Processor,
    /// Memory.
    pub memory: Memory,
    /// The balloon.
    pub balloon: balloon::Balloon,
    /// The volume, and the disks on it.
    pub storage: Storage,
    /// What disks are to the guest and to the host.
    pub disk: Drives,
    /// The network.
    pub network: Network,
    /// The screen.
    pub screen: Picture,
    /// The machine.
    pub machine: Machine,
    /// The life of the pod.
    pub pod: Pod,
}

impl Settings {
    /// The name of what runs, for pages: APP, unless the probe runs and nobody chose a name.
    pub fn title(&self) -> &str {
        let app = &*self.pod.app.0;
        let usual = list::find("APP").is_some_and(|variable| variable.default == app);
        match self.windows.version {
            Version::Probe if usual => "Transom probe",
            _ => app,
        }
    }

    /// The keyboard that the guest expects.
    pub fn layout(&self) -> Arc<Layout> {
        let windows = &self.windows;
        let name = windows.keyboard.as_ref().map_or_else(|| windows.language.show(), Value::show);
        // A layout that viewers' symbols cannot be led back to leaves the usual one.
        let layout = Layout::named(&name).or_else(|_| LayoutName::default().layout());
        layout.expect("the usual layout is in the table")
    }

    /// What is so when nobody sets anything: the defaults of the list.
    pub fn unsaid() -> Self {
        let mut settings = Self::default();
        for variable in list::all().filter(|variable| !variable.default.is_empty()) {
            let Some(slot) = &variable.slot else { continue };
            (slot.store)(&mut settings, variable.default).expect("a test reads every default");
        }
        settings
    }

    /// The port for VNC viewers, if the pod listens for them.
    pub fn vnc(&self) -> Option<u16> {
        let is = self.screen.display.is;
        let usual = is == Display::Vnc || self.pod.compat == Compat::Dockur;
        let usual = usual.then_some(VNC_PORT);
        let said = self.screen.vnc_port.and_then(|it| u16::try_from(it.0).ok());
        said.or(usual).filter(|_| matches!(is, Display::Web | Display::Vnc))
    }
}

/// Which Windows, and how it is set up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Windows {
    /// What runs.
    pub version: Version,
    /// Which image of a medium.
    pub edition: Option<Edition>,
    /// Its language.
    pub language: Language,
    /// Its region; that of the language if unsaid.
    pub region: Option<Culture>,
    /// Its keyboard; that of the language if unsaid.
    pub keyboard: Option<Keyboard>,
    /// Its key.
    pub key: Option<ProductKey>,
    /// Pixels across.
    pub width: Within<640, 8192>,
    /// Pixels down.
    pub height: Within<480, 8192>,
    /// A person answers.
    pub manual: bool,
    /// What runs at the end.
    pub command: Option<String>,
    /// What ran is logged.
    pub log: bool,
}

/// Who uses Windows, and what it is called.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    /// The name.
    pub user: UserName,
    /// The password.
    pub password: Secret,
    /// Windows logs it on.
    pub autologin: bool,
    /// The domain to join.
    pub domain: Option<Domain>,
    /// The place in the domain.
    pub unit: Option<String>,
    /// The workgroup to join.
    pub workgroup: Option<Workgroup>,
    /// The computer.
    pub host: Option<HostName>,
}

/// Where Windows comes from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Media {
    /// Checksums are compared.
    pub verify: bool,
    /// Media go when they are no longer needed.
    pub remove: bool,
    /// The download page is asked.
    pub mido: bool,
    /// The catalogue is asked.
    pub esd: bool,
    /// At once.
    pub connections: Within<1, 16>,
    /// The medium is in an archive.
    pub unpack: bool,
}

/// Processors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Processor {
    /// How many.
    pub cores: Cores,
    /// How they are arranged.
    pub topology: Option<Topology>,
    /// Which.
    pub model: Option<Words<Model>>,
    /// What they can.
    pub flags: Option<Flags>,
    /// Hyper-V's enlightenments.
    pub hyperv: bool,
}

/// Memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// How much.
    pub size: Ram,
    /// Never more than is free.
    pub check: bool,
    /// The least that makes sense.
    pub minimum: Option<Size>,
}

/// The volume, and the disks on it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Storage {
    /// Where it is.
    pub folder: PathBuf,
    /// The size of the disk.
    pub size: Disk,
    /// The least that makes sense.
    pub minimum: Option<Size>,
    /// Sizes of the second to the sixth disk.
    pub more: [Option<Disk>; 5],
    /// Block devices that are disks.
    pub devices: [Option<PathBuf>; 6],
    /// The format of new disks; that of the file that is there if unsaid, else raw.
    pub format: Option<Format>,
    /// The name of the disk's file.
    pub name: FileName,
}

choices! {
    /// The format of a disk's file.
    Format:
    /// Bytes as they are.
    #[default]
    Raw "raw" or "img";
    /// QEMU's format.
    Qcow2 "qcow2";
}

choices! {
    /// What becomes of what the guest discards.
    Discard:
    /// It is given back.
    #[default]
    Unmap "unmap" or "y", "yes", "true", "1", "on", "enable", "enabled";
    /// It stays.
    Ignore "ignore" or "n", "no", "none", "false", "0", "off", "disable", "disabled";
}

/// What disks are to the guest and to the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drives {
    /// Their controller.
    pub controller: Words<Bus>,
    /// The controller of the install medium.
    pub media: Words<Bus>,
    /// The host's cache.
    pub cache: Words<Cache>,
    /// The host's way to read and write.
    pub io: Words<Engine>,
    /// Discarding.
    pub discard: Discard,
    /// There are none.
    pub disable: bool,
    /// Their room is taken at once.
    pub allocate: bool,
}

/// How the guest reaches the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// Through a tap of the pod, with address translation.
    #[default]
    Nat,
    /// By connections of the pod's own.
    User,
    /// Not at all.
    None,
}

impl Value for Way {
    const ACCEPTS: &'static str = "nat, user, none";

    fn read(text: &str) -> anyhow::Result<Self> {
        match text.to_ascii_lowercase().as_str() {
            "nat" | "tap" | "tun" | "tuntap" => Ok(Self::Nat),
            "user" | "passt" | "slirp" => Ok(Self::User),
            "none" => Ok(Self::None),
            other => match switch(other) {
                Some(true) => Ok(Self::Nat),
                Some(false) => Ok(Self::None),
                None => anyhow::bail!("give nat, user or none"),
            },
        }
    }
    fn show(&self) -> String {
        match self {
            Self::Nat => "nat".into(),
            Self::User => "user".into(),
            Self::None => "none".into(),
        }
    }
}

/// The network.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Network {
    /// How the guest gets there.
    pub kind: Way,
    /// It has an address of the host's network.
    pub dhcp: bool,
    /// The pod's interface.
    pub uplink: Option<Interface>,
    /// The guest's address.
    pub address: Option<Ipv4Addr>,
    /// Its network's mask.
    pub mask: Mask,
    /// Its card's address.
    pub mac: Option<Mac>,
    /// The tap.
    pub tap: Interface,
    /// The longest packet.
    pub mtu: Option<Within<576, 65521>>,
    /// The guest's card.
    pub adapter: Words<Adapter>,
    /// Ports of the pod.
    pub kept: Ports,
    /// Ports of the guest in user mode.
    pub forwarded: Ports,
}

/// The screen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Picture {
    /// Where it is seen.
    pub display: Words<Display>,
    /// What the guest sees.
    pub adapter: Words<Screen>,
    /// For VNC viewers, where they are asked for.
    pub vnc_port: Option<Within<5900, 65535>>,
    /// Browsers are served.
    pub web: bool,
    /// For browsers.
    pub web_port: Port,
    /// A password is asked for.
    pub protect: Option<bool>,
    /// That password.
    pub pass: Option<Secret>,
    /// What browsers call us.
    pub web_origin: Option<Origins>,
    /// Proxies that are believed.
    pub web_proxy: Option<Proxies>,
}

choices! {
    /// The firmware. Words that mean the same have files of their own on the volume.
    Boot:
    /// UEFI.
    #[default]
    Uefi "windows";
    /// The same by another word.
    UefiPlain "windows_plain";
    /// The same by the word of the reference's base image.
    UefiBase "uefi";
    /// UEFI with Secure Boot and a TPM.
    Secure "windows_secure";
    /// The same by the word of the reference's base image.
    SecureBase "secure";
}

impl Boot {
    /// Whether it is with Secure Boot.
    pub fn is_secure(self) -> bool {
        matches!(self, Self::Secure | Self::SecureBase)
    }

    /// All words that mean the same.
    pub fn same(self) -> &'static [Self] {
        match self.is_secure() {
            true => &[Self::Secure, Self::SecureBase],
            false => &[Self::Uefi, Self::UefiPlain, Self::UefiBase],
        }
    }
}

/// The machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// Its kind.
    pub kind: Words<Kind>,
    /// Its firmware.
    pub boot: Boot,
    /// A TPM.
    pub tpm: Option<bool>,
    /// The firmware forgets.
    pub clear: bool,
    /// Its USB controller.
    pub usb: Words<Usb>,
    /// Its pointer.
    pub mouse: Words<Pointer>,
    /// Random numbers of the host.
    pub rng: bool,
    /// Its identity.
    pub uuid: Option<Uuid>,
    /// What SMBIOS says.
    pub smbios: Option<Smbios>,
    /// A high precision event timer.
    pub hpet: bool,
    /// The first serial port.
    pub serial: Words<Serial>,
    /// The clock's time zone.
    pub zone: Option<Zone>,
    /// What QEMU's options became.
    pub arguments: Option<Arguments>,
}

choices! {
    /// Whose ways are followed where they are not ours.
    Compat:
    /// Nobody's.
    #[default]
    None "none" or "transom", "n";
    /// The reference image's.
    Dockur "dockur";
}

choices! {
    /// How messages are written.
    LogFormat:
    /// For people.
    #[default]
    Text "text";
    /// For programs.
    Json "json";
}

/// The life of the pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pod {
    /// What runs.
    pub app: FileName,
    /// The guest is asked to shut down.
    pub shutdown: bool,
    /// Seconds to stop.
    pub timeout: Within<1, 86400>,
    /// The same by its old name.
    pub timeout_old: Option<Within<1, 86400>>,
    /// Seconds for which a failure is shown.
    pub hold: Within<0, 86400>,
    /// Whose ways.
    pub compat: Compat,
    /// How messages are written.
    pub format: LogFormat,
    /// More messages.
    pub debug: bool,
    /// All messages.
    pub trace: bool,
    /// The engine of the container.
    pub engine: Option<String>,
}

impl Pod {
    /// How the names of the pod's files on the volume begin, as in the reference image.
    pub fn process(&self) -> String {
        self.app.0.to_lowercase().replace(' ', "-")
    }
}
