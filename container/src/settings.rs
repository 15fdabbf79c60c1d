//! The settings of a machine: the environment's variables, parsed into types.
//!
//! `list` has one row per variable: its name, its default, its field in [`Settings`] and its
//! description. The type of the field is the parser. `environment` reads all variables. `settle`
//! combines the settings with the resources of the host and computes the sizes of the machine.

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
use self::translate::monitor::{Monitor, Place, Protocol};
use self::translate::smbios::Smbios;
use self::translate::{
    Adapter, Bus, Cache, Display, Engine, Kind, Model, Pointer, Screen, Serial, Sound, Topology,
    Translated, Usb,
};
use self::trust::{Origins, Proxies};
use self::value::{Cores, Disk, KeyFile, Port, Ram, Secret, Time, Value, Within, choices, switch};
use self::version::Version;
use self::words::{
    Domain, DriversFrom, Edition, FileName, HostList, HostName, Interface, KeptAddress, Mask,
    Ports, ProductKey, ProxyUrl, UserName, Workgroup, Zone,
};

/// The socket of the human monitor in the reference image.
pub const MONITOR_SOCKET: &str = "/run/shm/monitor.sock";
/// The default port of VNC servers (RFC 6143 9).
const VNC_PORT: u16 = 5900;
/// The port of the guest's remote desktop.
pub const RDP: u16 = 3389;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    pub windows: Windows,
    pub account: Account,
    pub media: Media,
    pub web: Web,
    pub processor: Processor,
    pub memory: Memory,
    pub balloon: balloon::Balloon,
    pub storage: Storage,
    pub disk: DiskSettings,
    pub network: Network,
    pub shares: Shares,
    pub screen: ScreenSettings,
    pub machine: Machine,
    pub pod: Pod,
}

impl Settings {
    pub fn has_tpm(&self) -> bool {
        self.machine.tpm.unwrap_or(self.machine.boot.is_secure())
    }

    /// Whether ARGUMENTS ask for a clock in UTC instead of local time.
    pub fn has_utc_clock(&self) -> bool {
        self.machine.arguments.as_ref().is_some_and(|it| it.utc)
    }

    /// The name that web pages show: APP, or `Transom probe` if the probe runs and APP is its
    /// default.
    pub fn title(&self) -> &str {
        let app = &*self.pod.app.0;
        let usual = list::find("APP").is_some_and(|variable| variable.default == app);
        match self.windows.version {
            Version::Probe if usual => "Transom probe",
            _ => app,
        }
    }

    /// The keyboard layout that the guest expects.
    pub fn layout(&self) -> Arc<Layout> {
        let windows = &self.windows;
        let name = windows.keyboard.as_ref().map_or_else(|| windows.language.show(), Value::show);
        // Viewers' key symbols cannot be translated to every layout. The default layout replaces
        // those.
        let layout = Layout::named(&name).or_else(|_| LayoutName::default().layout());
        layout.expect("the usual layout is in the table")
    }

    /// The settings of an empty environment: the defaults of the list.
    pub fn defaults() -> Self {
        let mut settings = Self::default();
        for variable in list::all().filter(|variable| !variable.default.is_empty()) {
            let Some(slot) = &variable.slot else { continue };
            (slot.store)(&mut settings, variable.default).expect("a test reads every default");
        }
        settings
    }

    /// Listeners for QEMU's control protocols.
    pub fn monitors(&self) -> Vec<(Protocol, Place)> {
        let of = |protocol, monitor: &Option<Monitor>| {
            Some((protocol, monitor.as_ref()?.place.clone()?))
        };
        let own = [of(Protocol::Qmp, &self.pod.qmp), of(Protocol::Human, &self.pod.monitor)];
        let arguments = self.machine.arguments.iter().flat_map(|it| it.monitors.iter().cloned());
        let mut all: Vec<_> = own.into_iter().flatten().chain(arguments).collect();
        let usual = Place::Unix(MONITOR_SOCKET.into());
        if self.pod.compat == Compat::Dockur && all.iter().all(|(_, place)| *place != usual) {
            all.push((Protocol::Human, usual));
        }
        all
    }

    /// TCP ports of [`Self::monitors`].
    pub fn monitor_ports(&self) -> Vec<u16> {
        let all = self.monitors().into_iter();
        all.filter_map(|(_, place)| match place {
            Place::Tcp(address) => Some(address.port()),
            Place::Unix(_) => None,
        })
        .collect()
    }

    /// The port at which the pod waits for the machine of another one, if it may.
    pub fn migrate_port(&self) -> Option<u16> {
        let waits = self.pod.shutdown == Shutdown::Migrate;
        u16::try_from(self.pod.migration.port.0).ok().filter(|_| waits)
    }

    /// The ports that stay with the pod, each with the reason.
    pub fn kept_ports(&self) -> Vec<(u16, words::Protocol, &'static str)> {
        let host = self.network.host_ports.0.iter();
        let web = u16::try_from(self.screen.web_port.0).ok().filter(|_| self.screen.web);
        let own = web.map(|it| (it, "it is WEB_PORT"));
        let own = own.into_iter().chain(self.vnc().map(|it| (it, "it is VNC_PORT")));
        let monitors = self.monitor_ports().into_iter();
        let own = own.chain(monitors.map(|it| (it, "QMP or MONITOR uses it")));
        let own = own.chain(self.migrate_port().map(|it| (it, "it is MIGRATE_PORT")));
        host.map(|(port, protocol)| (*port, *protocol, "it is in HOST_PORTS"))
            .chain(own.map(|(port, why)| (port, words::Protocol::Tcp, why)))
            .collect()
    }

    /// The port for VNC viewers, or nothing if the pod has no VNC server.
    pub fn vnc(&self) -> Option<u16> {
        let is = self.screen.display.value;
        let usual = is == Display::Vnc || self.pod.compat == Compat::Dockur;
        let usual = usual.then_some(VNC_PORT);
        let said = self.screen.vnc_port.and_then(|it| u16::try_from(it.0).ok());
        said.or(usual).filter(|_| matches!(is, Display::Web | Display::Vnc))
    }
}

/// The version of Windows, and how it is set up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Windows {
    pub version: Version,
    /// The image that is installed from a medium with several.
    pub edition: Option<Edition>,
    pub installer: Installer,
    pub language: Language,
    /// The culture of dates and numbers. Defaults to that of the language.
    pub region: Option<Culture>,
    /// The keyboard layout. Defaults to that of the language.
    pub keyboard: Option<Keyboard>,
    pub key: Option<ProductKey>,
    pub width: Within<320, 16384>,
    pub height: Within<200, 16384>,
    /// Windows Setup asks its questions, and a person answers them.
    pub manual: bool,
    /// A command that runs at the end of the installation.
    pub command: Option<String>,
    /// Keeps a log of the commands that ran.
    pub log: bool,
}

choices! {
    /// The program that installs Windows.
    Installer:
    /// Windows Setup.
    #[default]
    Setup "setup";
    /// A script in Windows PE, with Microsoft's tools.
    Script "script";
}

/// The user account, and the identity of the computer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    pub user: UserName,
    /// Password of the account and of the screen.
    pub password: Secret,
    pub autologin: bool,
    pub domain: Option<Domain>,
    /// The organizational unit of the computer in the domain.
    pub unit: Option<String>,
    pub workgroup: Option<Workgroup>,
    pub host: Option<HostName>,
}

/// Where the installation media of Windows come from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Media {
    /// Requests the medium from Microsoft's download page.
    pub mido: bool,
    /// Removes downloaded media when Windows starts from its disk.
    pub remove: bool,
    /// Microsoft's catalog of upgrade images (ESD) is asked, too.
    pub esd: bool,
    /// Number of parallel connections of a download.
    pub connections: Within<1, 16>,
    /// The ISO image with Windows' drivers, if it is not the usual one.
    pub drivers: Option<DriversFrom>,
}

/// How the pod reaches web servers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Web {
    pub http_proxy: Option<ProxyUrl>,
    pub https_proxy: Option<ProxyUrl>,
    /// Hosts that are reached without a proxy.
    pub no_proxy: Option<HostList>,
    /// A file with further root certificates.
    pub certificates: Option<PathBuf>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Processor {
    pub cores: Cores,
    /// Takes the place of `cores`.
    pub topology: Option<Topology>,
    /// Always the host's.
    pub model: Option<Translated<Model>>,
    /// Feature flags in QEMU's words.
    pub flags: Option<Flags>,
    /// The guest sees that there is a hypervisor.
    pub virtual_machine: bool,
    /// The guest can run virtual machines, unless the flags say otherwise.
    pub nested: bool,
    /// Always on. Off only changes messages.
    pub kvm: bool,
    /// Enables Hyper-V's enlightenments.
    pub hyperv: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    pub size: Ram,
    /// Reduces a size that exceeds the free memory.
    pub check: bool,
    /// A smaller memory is an error. The default depends on the version.
    pub minimum: Option<Size>,
}

/// The volume, and the sizes of the disks on it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Storage {
    pub folder: PathBuf,
    /// Size of the first disk.
    pub size: Disk,
    /// A smaller disk is an error. The default depends on the version.
    pub minimum: Option<Size>,
    /// Sizes of the second to the sixth disk.
    pub more: [Option<Disk>; 5],
    /// Block devices that are used in place of disk images.
    pub devices: [Option<PathBuf>; 6],
    /// Format of new disks. Defaults to the format of the existing file, else to raw.
    pub format: Option<Format>,
    /// Name of the disk's file, without its extension.
    pub name: FileName,
    /// An image, or a folder with one, that the first disk is made over.
    pub base: Option<PathBuf>,
}

choices! {
    /// The format of a disk image.
    Format:
    /// The plain content of the disk.
    #[default]
    Raw "raw" or "img";
    /// QEMU's format.
    Qcow2 "qcow2";
}

choices! {
    /// Whether the guest's discards free space on the volume.
    Discard:
    /// Discarded space is freed.
    #[default]
    Unmap "unmap" or "y", "yes", "true", "1", "on", "enable", "enabled";
    /// Discarded space stays allocated.
    Ignore "ignore" or "n", "no", "none", "false", "0", "off", "disable", "disabled";
}

/// How disks are attached to the guest and accessed on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiskSettings {
    pub controller: Translated<Bus>,
    /// Controller of the installation medium.
    pub media: Translated<Bus>,
    pub cache: Translated<Cache>,
    pub io: Translated<Engine>,
    pub discard: Discard,
    /// The machine has no disk.
    pub disable: bool,
    /// Allocates the whole disk when it is created.
    pub allocate: bool,
    /// Nothing that the guest writes is kept.
    pub ephemeral: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NetworkKind {
    /// Through a tap device of the pod, with address translation.
    #[default]
    Nat,
    /// User mode: the pod opens a connection of its own for each of the guest's.
    User,
    None,
}

impl Value for NetworkKind {
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

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Network {
    pub kind: NetworkKind,
    /// The guest gets an address of the host's network by DHCP.
    pub dhcp: bool,
    /// Interface of the pod that leads to the network.
    pub uplink: Option<Interface>,
    /// The guest's IPv4 address.
    pub address: Option<Ipv4Addr>,
    pub mask: Mask,
    /// In user mode, what a guest knows that goes on. No variable sets it.
    pub kept: Option<KeptAddress>,
    pub mac: Option<Mac>,
    pub tap: Interface,
    pub mtu: Option<Within<576, 65521>>,
    pub adapter: Translated<Adapter>,
    /// Ports that stay with the pod and are not forwarded to the guest.
    pub host_ports: Ports,
    /// In user mode, ports that are forwarded to the guest. With NAT, TCP ports that are also
    /// forwarded from the loopback address and by IPv6.
    pub user_ports: Ports,
}

/// The shared folders.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shares {
    pub on: bool,
    pub read_only: bool,
    /// Windows gets a drive and a link on the desktop.
    pub shortcut: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScreenSettings {
    pub display: Translated<Display>,
    pub adapter: Translated<Screen>,
    /// See [`Settings::vnc`] for its default.
    pub vnc_port: Option<Within<5900, 65535>>,
    pub web: bool,
    pub web_port: Port,
    /// Viewers need a password.
    pub protect: Option<bool>,
    /// Password of the viewers.
    pub pass: Option<Secret>,
    /// The guest has a sound card.
    pub audio: bool,
    pub clipboard: bool,
    pub sound: Translated<Sound>,
    pub web_origin: Option<Origins>,
    pub web_proxy: Option<Proxies>,
}

choices! {
    /// The firmware. Synonyms are variants of their own, because each has its own files on the
    /// volume.
    Boot:
    /// UEFI.
    #[default]
    Uefi "windows";
    /// A synonym of `Uefi`.
    UefiPlain "windows_plain";
    /// A synonym of `Uefi`, used by the reference image's base image.
    UefiBase "uefi";
    /// UEFI with Secure Boot and a TPM.
    Secure "windows_secure";
    /// A synonym of `Secure`, used by the reference image's base image.
    SecureBase "secure";
}

impl Boot {
    pub fn is_secure(self) -> bool {
        matches!(self, Self::Secure | Self::SecureBase)
    }

    /// All synonyms of this firmware, itself included.
    pub fn same(self) -> &'static [Self] {
        match self.is_secure() {
            true => &[Self::Secure, Self::SecureBase],
            false => &[Self::Uefi, Self::UefiPlain, Self::UefiBase],
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// Chipset.
    pub kind: Translated<Kind>,
    pub boot: Boot,
    pub tpm: Option<bool>,
    /// Resets the firmware's variables.
    pub clear: bool,
    pub usb: Translated<Usb>,
    pub mouse: Translated<Pointer>,
    pub rng: bool,
    pub uuid: Option<Uuid>,
    pub smbios: Option<Smbios>,
    pub hpet: bool,
    pub serial: Translated<Serial>,
    pub zone: Option<Zone>,
    /// QEMU options, translated.
    pub arguments: Option<Arguments>,
}

choices! {
    /// The image whose behavior is followed where it differs from ours.
    Compat:
    /// None: Transom's own behavior.
    #[default]
    None "none" or "transom", "n";
    /// The reference image.
    Dockur "dockur";
}

/// The way in which the machine ends when the pod stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shutdown {
    /// The guest is asked to shut down.
    #[default]
    Ask,
    /// The machine is switched off.
    Off,
    /// The machine is saved on the volume.
    Suspend,
    /// The machine moves to another pod on the volume. If there is none, it is saved.
    Migrate,
}

impl Shutdown {
    /// Whether the machine is to go on where it was.
    pub const fn keeps_running_state(self) -> bool {
        matches!(self, Self::Suspend | Self::Migrate)
    }
}

impl Value for Shutdown {
    const ACCEPTS: &'static str = "Y, N, suspend or migrate";
    const LENIENT: bool = true;

    fn read(text: &str) -> anyhow::Result<Self> {
        match switch(text) {
            Some(true) => Ok(Self::Ask),
            Some(false) => Ok(Self::Off),
            None if text.eq_ignore_ascii_case("suspend") => Ok(Self::Suspend),
            None if text.eq_ignore_ascii_case("migrate") => Ok(Self::Migrate),
            None => anyhow::bail!("give {}", Self::ACCEPTS),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Ask => "Y",
            Self::Off => "N",
            Self::Suspend => "suspend",
            Self::Migrate => "migrate",
        }
        .to_owned()
    }
}

choices! {
    /// The format of log messages.
    LogFormat:
    /// Text for people.
    #[default]
    Text "text";
    /// One JSON object per message.
    Json "json";
}

/// The move of a machine to another pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Migration {
    /// Where a pod waits for the machine of another one.
    pub port: Port,
    /// Milliseconds for which the guest may stand still.
    pub pause: Within<1, 10_000>,
}

/// Logging, shutdown and compatibility of the pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pod {
    /// Name of the pod, shown on pages and used in file names.
    pub app: FileName,
    pub shutdown: Shutdown,
    pub migration: Migration,
    /// Seconds that a shutdown may take.
    pub timeout: Within<1, 86400>,
    /// The machine sleeps when nobody has needed it for this long.
    pub idle: Option<Time<10, 2_592_000>>,
    /// The key for memory that is saved on the volume.
    pub snapshot_key: Option<KeyFile>,
    /// The former name of `timeout`. It takes precedence if both are set.
    pub timeout_old: Option<Within<1, 86400>>,
    /// Seconds for which a failure stays visible before the pod exits.
    pub hold: Within<0, 86400>,
    pub compat: Compat,
    pub format: LogFormat,
    pub debug: bool,
    pub trace: bool,
    pub engine: Option<String>,
    /// The listeners for QEMU's control protocols.
    pub qmp: Option<Monitor>,
    pub monitor: Option<Monitor>,
}

impl Pod {
    /// The prefix of the pod's files on the volume, as in the reference image.
    pub fn process(&self) -> String {
        self.app.0.to_lowercase().replace(' ', "-")
    }
}
