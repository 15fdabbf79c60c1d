//! The configuration of a machine. Each entry of `options!` is a command-line flag, a key of
//! `--config FILE.json`, an entry of `vmm help run` and a row of the reference.

mod boot;
mod device_options;
mod display;
mod features;
pub(crate) mod guid;
mod item;
mod listeners;
mod restore;
mod smbios;
mod suggestions;

use std::fmt;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use anyhow::{Context, bail};
use devices::platform::tpm;
use devices::registry;
use host::disk;
use host::stream::Stream;
use serde::de::{self, DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

pub use self::boot::BootOrder;
pub use self::display::{Absent, Adapter, Display, Present};
pub use self::features::{Features, Hidden, Hide, Level, Vendor};
pub use self::item::Item;
pub use self::restore::{Checks, Cloning, Incoming, Options, Restore};
pub use self::smbios::Smbios;
use self::suggestions::suggest;
pub use crate::msr::UnknownMsr;
pub use crate::parent::Parent;
use crate::status::{Failure, Status};
use host::keyvalue;
pub use host::keyvalue::edit_distance;
use host::listen::UnixAddress;
use host::size::Size;
use host::uuid::Uuid;
use screen::keys::layout;
use screen::rfb::listen;
use screen::web;

#[derive(Clone, Copy, Debug)]
pub struct Opt {
    /// `--KEY` on the command line, `"KEY"` in JSON.
    pub key: &'static str,
    /// Syntax of the value. Empty for a switch, which takes none.
    pub value: &'static str,
    /// One or more sentences.
    pub help: &'static str,
    pub repeats: bool,
}

macro_rules! options {
    ($($(#[doc = $help:literal])+ $key:literal $value:literal $field:ident: $type:ty,)*) => {
        #[derive(Clone, Debug, Default, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Config {
            $(
                $(#[doc = $help])+
                #[serde(
                    rename = $key,
                    deserialize_with = "deserialize_option",
                    skip_serializing_if = "is_default"
                )]
                pub $field: $type,
            )*
        }

        /// Ordered as in the help.
        pub const OPTIONS: &[Opt] = &[$(Opt {
            key: $key,
            value: $value,
            help: concat!($($help),+),
            repeats: <$type as OptionValue>::REPEATS,
        }),*];

        impl Config {
            /// Sets one option from the command line.
            pub fn set(&mut self, key: &str, text: &str) -> anyhow::Result<()> {
                let set = match key {
                    $($key => self.$field.read_text(text),)*
                    _ => return Err(unknown(key)),
                };
                set.with_context(|| format!("--{key} {text}")).map_err(usage)
            }
        }
    };
}

options! {
    /// Number of processors. COUNT alone means one socket with COUNT cores.
    "cpus" "COUNT[,sockets=N][,cores=N][,threads=N]" cpus: Cpus,
    /// Guest memory: a number with K, M, G or T. `hugepages=2M` uses huge pages of this size (2M or
    /// 1G) from hugetlbfs; `prealloc` allocates all memory at startup.
    "memory" "SIZE[,hugepages=SIZE][,prealloc]" memory: Memory,
    /// UEFI firmware: the code half of a stock OVMF image.
    "firmware" "FILE" firmware: Option<PathBuf>,
    /// UEFI variable store: your own writable copy of OVMF_VARS. The firmware saves its settings
    /// there.
    "vars" "FILE" vars: Option<PathBuf>,
    /// System-management mode (SMM), which firmware with Secure Boot needs: with `on`, only that
    /// firmware can change its variables and see its memory. Needs X86_SMM (see `vmm doctor`), and
    /// firmware that was built for SMM, such as Debian's `OVMF_CODE_4M.secboot.fd`: others cannot
    /// save their variables. Defaults to `off`.
    "smm" "on|off" smm: bool,
    /// Boot order: device names as shown by `vmm inspect`, as in `usb-storage,nvme`. Disks that are
    /// not listed are not booted. By default, the firmware finds bootable devices by itself and
    /// remembers them.
    "boot" "DEVICE[,DEVICE...]" boot: BootOrder,
    /// Linux kernel: a bzImage, or an ELF file with a PVH entry point. Started directly, or by the
    /// firmware if `--firmware` is set (bzImage only).
    "kernel" "FILE" kernel: Option<PathBuf>,
    /// Initial RAM disk for the kernel.
    "initrd" "FILE" initrd: Option<PathBuf>,
    /// Command line for the kernel.
    "cmdline" "TEXT" cmdline: Option<String>,
    /// First serial port: `stdio` (default; Ctrl-A x quits), `file:PATH`, `socket:PATH` or `none`.
    "serial" "TO" serial: Option<Stream>,
    /// Display: the preferred resolution (default 1280x800), then further keys of the `display`
    /// device; or `none` for no display. With the key `adapter=virtio`, it is the device
    /// `virtio-gpu`, whose size follows the viewer's window.
    "display" "none|WIDTHxHEIGHT[,KEY=VALUE...]" display: Display,
    /// Keyboard layout that the guest is configured for, used for viewers that send characters and
    /// for `vmm ctl type`: a language or locale such as `de`, `ko` or `fr-CA`. Defaults to `us`.
    "keyboard" "NAME" keyboard: layout::Name,
    /// Disk: an image file or a block device, attached as an `nvme` device, for which every common
    /// operating system has a driver. Takes the keys of `nvme`; use `--device` for other kinds of
    /// disks.
    "disk" "PATH[,KEY=VALUE...]" disk: Vec<disk::Config>,
    /// TPM 2.0: the control socket of a running swtpm, started with `swtpm socket --tpm2 --tpmstate
    /// dir=DIR --ctrl type=unixio,path=PATH`. It is shut down with the machine.
    "tpm" "PATH" tpm: Option<tpm::Config>,
    /// Additional device: its kind, then its keys. `vmm help devices` lists all kinds.
    "device" "KIND[,KEY=VALUE...]" device: Vec<registry::Config>,
    /// Unix socket for `vmm ctl`, which controls the running machine: status, pause, resume, reset,
    /// power button and more. `fd:N` is an inherited listening socket.
    "control" "PATH|fd:N" control: Option<UnixAddress>,
    /// Serve the screen to VNC viewers. A port that other hosts can reach needs a password, or
    /// `auth=none` to allow everybody. Password files hold the password in their first line;
    /// viewers with the `view-password` cannot send input. With `tls-cert` and `tls-key`, viewers
    /// must use TLS and can be required to log in as `user`. `view-only` ignores the input of all
    /// viewers. `shared` refuses exclusive access: a new viewer never disconnects the others.
    /// `name` is the window title, and `called` the name of this listener in log messages.
    /// `announced` is for Unix sockets behind a front end that has already authenticated its
    /// clients: each connection starts with a line that names the client, after `view-only ` if it
    /// may only look. `fd:N` is an inherited listening socket. Each listener has its own settings.
    "vnc" "HOST:PORT|unix:PATH|fd:N[,password=FILE][,view-password=FILE][,user=NAME]\
           [,tls-cert=FILE,tls-key=FILE][,auth=none][,view-only][,shared][,name=TEXT]\
           [,called=TEXT][,announced]"
    vnc: Vec<listen::Config>,
    /// Serve the screen to web browsers, on a page with noVNC. Passwords, TLS and the other keys
    /// work as for `--vnc`; certificate files may be replaced at any time. Behind a reverse proxy,
    /// `origin` is the URL that browsers use, and `proxy` is the address or network of a trusted
    /// proxy, whose information about the client is believed. Separate several values with spaces.
    "web" "HOST:PORT|unix:PATH|fd:N[,password=FILE][,view-password=FILE][,user=NAME]\
           [,tls-cert=FILE,tls-key=FILE][,auth=none][,view-only][,origin=URL][,proxy=ADDRESS]\
           [,name=TEXT]"
    web: Option<web::Config>,
    /// Sandbox: privileges that this process gives up before the guest runs. `auto` (default): all
    /// capabilities, the network namespace and most system calls. Control commands can still open
    /// any file that the user of the process may open, and root stays root. `on`: also access to
    /// all files except those that are open, those in the folders of disks and removable media, and
    /// those in `folders`; restrictions that this host does not support are logged. `must`: as
    /// `on`, but the machine does not start if a restriction is unsupported; leaving the network
    /// namespace needs CAP_SYS_ADMIN. `user` is the user that root switches to. `seccomp=log`
    /// allows forbidden system calls, and the kernel logs them. `debug` allows debuggers and core
    /// dumps.
    "jail" "auto|off|on|must[,user=UID[:GID]][,folders=PATH[:PATH...]][,seccomp=on|off|log]\
            [,landlock=on|off][,debug]"
    jail: jail::Config,
    /// Hyper-V enlightenments: `kvm` are those of this host's KVM; `own` are fewer (identity,
    /// clocks, crash reports) and need no support of KVM for Hyper-V; `on` are those of KVM if it
    /// has them, and `own` otherwise; `auto` (default) is `on` with firmware, and `off` for a
    /// kernel that is started directly.
    "hyperv" "auto|on|kvm|own|off" hyperv: Hyperv,
    /// Features of the processor. `nested`: virtualization (VMX or SVM), with which the guest runs
    /// virtual machines of its own, if this host's KVM offers that. `level`: only what every
    /// processor of `x86-64-v2` (with AES), `x86-64-v3` or `x86-64-v4` has, so that the machine can
    /// continue on hosts with other processors of the same vendor; its addresses have 39 bits, and
    /// it has no performance counters. `without` hides features, by QEMU's names: `kvm` (all that
    /// KVM says of itself), `hypervisor` (that there is one at all), or one of Hyper-V's:
    /// `hv-relaxed`, `hv-vapic`, `hv-time`, `hv-crash`, `hv-vpindex`, `hv-runtime`, `hv-synic`,
    /// `hv-stimer`, `hv-stimer-direct`, `hv-frequencies`, `hv-tlbflush`, `hv-tlbflush-ext`,
    /// `hv-ipi`, `hv-xmm-input`, `hv-avic`, `hv-spinlocks`. `hv-vendor` is the vendor that
    /// Hyper-V's part names, by default `Microsoft Hv`.
    "features" "[nested][,level=NAME][,without=NAME[:NAME...]][,hv-vendor=TEXT]" features: Features,
    /// Access to unknown model-specific registers (MSRs): `fault`, `ignore` (reads return zero), or
    /// `auto` (default), which is `ignore` if the guest is offered Hyper-V enlightenments and
    /// `fault` otherwise.
    "msr" "auto|fault|ignore" msr: UnknownMsr,
    /// Identification of the machine in the SMBIOS tables.
    "smbios" "[manufacturer=..][,product=..][,version=..][,serial=..][,uuid=..]" smbios: Smbios,
    /// VM Generation ID: a UUID that tells the guest when it was cloned or restored. The default is
    /// derived from the machine's UUID and therefore stays the same. `vmm ctl vmgenid` changes it.
    "vmgenid" "UUID" vmgenid: Option<String>,
    /// Pass a file to the guest through fw_cfg: `opt/...=TEXT`, or `opt/...=@FILE`.
    "fw-cfg" "NAME=VALUE" fw_cfg: Vec<Item>,
    /// Time that the guest gets to shut down on SIGTERM: the power button is pressed, and the
    /// machine is switched off when the time is over. Defaults to 0, which switches it off at once.
    "grace" "SECONDS" grace: Seconds,
    /// Exit when the process with this ID ends, usually the supervisor that started this machine.
    "die-with" "PID" die_with: Parent,
    /// Continue from a snapshot of `vmm ctl snapshot`. Options that are not given are those of the
    /// snapshot; devices, processors and memory must be the same, and disks as they were. Memory is
    /// read from the snapshot when the guest uses it, so the folder must stay unchanged until the
    /// machine ends; `copy` reads and checks all of it at first, into huge pages if the host has
    /// them. Otherwise its checksums are compared while the guest runs, whose writes to disks wait
    /// until then: damaged memory ends the machine, and its disks are as they were. With
    /// `check=first` the guest runs only afterwards, with `off` nothing is compared. With `paused`,
    /// the guest waits for `vmm ctl resume`, and its disks do not change until then. With
    /// `options=given`, no option comes from the snapshot: its guest may have taken over the
    /// machine that wrote it. With `clone=FOLDER`, it is a clone, of which there may be many at a
    /// time: in this new folder it gets a qcow2 image over each writable disk, a copy of `--vars`,
    /// and `config.json` for later starts with `--config`. With `clone` alone, you give these, and
    /// the images are empty. The guest gets a new VM Generation ID, unless the machine ended with
    /// the snapshot and is no clone. With `key`, the file of the key or passphrase of an encrypted
    /// snapshot, all memory is read, checked and decrypted at first. Restore only your own
    /// snapshots.
    "restore"
        "DIR[,key=FILE][,clone[=FOLDER]][,copy][,check=first|later|off][,paused][,options=given]"
        restore: Option<Restore>,
    /// Wait at this Unix socket for a running machine that `vmm ctl migrate` sends, and go on with
    /// it. Options that are not given are those of the machine, addresses of viewers and sockets
    /// too; devices, processors and memory must be the same, and disks the same files, which both
    /// ends use, one after the other. Only this user can connect. Let only your own machines
    /// arrive: they name the files that are opened here. With `options=given`, no option comes from
    /// the machine. It keeps its VM Generation ID.
    "incoming" "SOCKET[,options=given]" incoming: Option<Incoming>,
    /// Run firmware and kernels even if this host's KVM only emulates kernel-mode code.
    "accept-emulation" "" accept_emulation: bool,
}

/// An option's type: how it is read from the command line and from JSON.
trait OptionValue: Default + DeserializeOwned {
    const REPEATS: bool = false;
    /// The accepted JSON forms, for error messages.
    const JSON_FORMS: &'static str = "a string";

    /// Reads the text of one occurrence on the command line.
    fn read_text(&mut self, text: &str) -> anyhow::Result<()>;

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        Self::deserialize(de::value::MapAccessDeserializer::new(map))
    }

    fn list<'de, S: SeqAccess<'de>>(list: S) -> Result<Self, S::Error> {
        Self::deserialize(de::value::SeqAccessDeserializer::new(list))
    }
}

/// Deserializes an option from JSON: a string, number or boolean is read like the same text on the
/// command line; objects and lists are passed to serde.
fn deserialize_option<'de, D: Deserializer<'de>, T: OptionValue>(
    deserializer: D,
) -> Result<T, D::Error> {
    struct Any<T>(std::marker::PhantomData<T>);

    impl<'de, T: OptionValue> Visitor<'de> for Any<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(T::JSON_FORMS)
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            let mut value = T::default();
            value.read_text(text).map_err(|error| E::custom(format!("{error:#}")))?;
            Ok(value)
        }
        fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }
        fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }
        fn visit_bool<E: de::Error>(self, on: bool) -> Result<T, E> {
            self.visit_str(if on { "true" } else { "false" })
        }
        fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<T, M::Error> {
            T::object(map)
        }
        fn visit_seq<S: SeqAccess<'de>>(self, list: S) -> Result<T, S::Error> {
            T::list(list)
        }
    }

    deserializer.deserialize_any(Any(std::marker::PhantomData))
}

/// Keeps options with default values out of the output of `vmm inspect`.
fn is_default<T: Serialize + Default>(value: &T) -> bool {
    serde_json::to_value(value).ok() == serde_json::to_value(T::default()).ok()
}

impl OptionValue for Option<PathBuf> {
    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        anyhow::ensure!(!text.is_empty(), "a path is missing");
        *self = Some(text.into());
        Ok(())
    }
}

impl OptionValue for Option<String> {
    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        *self = Some(text.to_owned());
        Ok(())
    }
}

impl OptionValue for Option<UnixAddress> {
    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        *self = Some(UnixAddress::try_from(text.to_owned()).map_err(anyhow::Error::msg)?);
        Ok(())
    }
}

impl OptionValue for Option<Stream> {
    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        *self = Some(Stream::try_from(text.to_owned()).map_err(anyhow::Error::msg)?);
        Ok(())
    }
}

impl OptionValue for bool {
    const JSON_FORMS: &'static str = "true or false";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        *self = match text {
            "" | "true" | "on" => true,
            "false" | "off" => false,
            _ => bail!("`{text}` is neither true nor false"),
        };
        Ok(())
    }
}

/// Implements `OptionValue` for types that are a single serde value, such as `fault` or `auto`.
macro_rules! plain_words {
    ($($type:ty),*) => {$(
        impl OptionValue for $type {
            fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
                let word = serde_json::Value::from(text);
                *self = serde_json::from_value(word).map_err(keyvalue::explain)?;
                Ok(())
            }
        }
    )*};
}

plain_words!(UnknownMsr, Hyperv, layout::Name, Parent);

/// Implements `OptionValue` for types that are written as `first,key=value`.
macro_rules! flat_words {
    ($($type:ty: $first:expr, $else:literal;)*) => {$(
        impl OptionValue for $type {
            const JSON_FORMS: &'static str = $else;

            fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
                *self = keyvalue::parse(text, $first)?;
                Ok(())
            }
        }
    )*};
}

flat_words! {
    Cpus: Some("count"), "a number or an object";
    Memory: Some("size"), "a size or an object";
    Smbios: None, "an object";
    Features: None, "an object";
    jail::Config: Some("mode"), "a word or an object";
}

impl OptionValue for Seconds {
    const JSON_FORMS: &'static str = "a number of seconds";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        let number = text.parse().ok();
        self.0 = number.with_context(|| format!("`{text}` is not a number of seconds"))?;
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seconds(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cpus {
    /// `sockets * cores * threads`. Must not be 0.
    pub count: u32,
    /// Desktop editions of Windows use one or two.
    pub sockets: u32,
    /// Cores per socket; 0 means that `settle` computes the number.
    pub cores: u32,
    /// Threads per core.
    pub threads: u32,
}

impl Default for Cpus {
    fn default() -> Self {
        Self { count: 1, sockets: 1, cores: 0, threads: 1 }
    }
}

impl Cpus {
    /// Fills in `cores` if it is not set, and checks the topology.
    pub fn settle(mut self, max_processors: usize) -> anyhow::Result<Self> {
        let Self { count, sockets, cores, threads } = self;
        if count == 0 || sockets == 0 || threads == 0 {
            bail!("--cpus {self}: a machine needs at least one processor, socket and thread");
        }
        if count as usize > max_processors {
            bail!("--cpus {self}: this host's KVM allows at most {max_processors} processors");
        }
        let groups = u64::from(sockets) * u64::from(threads);
        if cores == 0 {
            if u64::from(count) % groups != 0 {
                bail!(
                    "--cpus {self}: {count} processors cannot be shared evenly among {sockets} \
                     sockets with {threads} threads per core"
                );
            }
            self.cores = u32::try_from(u64::from(count) / groups)?;
        } else if u64::from(cores) * groups != u64::from(count) {
            bail!(
                "--cpus {self}: {sockets} sockets of {cores} cores with {threads} threads are \
                 {} processors, not {count}",
                u64::from(cores) * groups
            );
        }
        Ok(self)
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, sockets, cores, threads } = self;
        write!(f, "{count}")?;
        // Print only values that differ from the default.
        for (name, value, default) in
            [("sockets", sockets, 1), ("cores", cores, 0), ("threads", threads, 1)]
        {
            if *value != default {
                write!(f, ",{name}={value}")?;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memory {
    /// Bytes: whole MiB, at least 16 MiB.
    pub size: Size,
    /// Allocate from hugetlbfs, with this page size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepages: Option<Size>,
    /// Allocate all memory at startup, not when the guest first touches it.
    pub prealloc: bool,
}

impl Default for Memory {
    fn default() -> Self {
        Self { size: Size(512 << 20), hugepages: None, prealloc: false }
    }
}

impl Memory {
    fn check(&self) -> anyhow::Result<()> {
        // OVMF works with 8 MiB; a kernel with its initial RAM disk needs some tens.
        const MIN_SIZE: u64 = 16 << 20;
        if self.size.0 < MIN_SIZE {
            let size = self.size;
            bail!("--memory {size}: too small: the minimum is 16M, and 4 GiB are written 4G");
        }
        if !self.size.0.is_multiple_of(1 << 20) {
            bail!("--memory {}: not a multiple of 1M", self.size);
        }
        Ok(())
    }
}

/// Whether the guest is offered Hyper-V's interface, and by whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hyperv {
    /// `On` with firmware, `Off` without.
    #[default]
    Auto,
    /// `Kvm` if KVM has it, else `Own` if KVM allows that, else `Off`.
    On,
    Kvm,
    Own,
    Off,
}

impl Config {
    /// Whether the screen is served to viewers, by VNC or to browsers.
    pub fn is_watched(&self) -> bool {
        !self.vnc.is_empty() || self.web.is_some()
    }

    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let file = fs::File::open(path).with_context(|| format!("configuration {name}"));
        Self::from_reader(file.map_err(usage)?, &name)
    }

    /// `name` appears in error messages.
    pub fn from_reader(mut from: impl Read, name: &str) -> anyhow::Result<Self> {
        let mut text = String::new();
        let read = from.read_to_string(&mut text).map_err(anyhow::Error::from);
        let config = read.and_then(|_| Self::from_json(&text));
        config.with_context(|| format!("configuration {name}")).map_err(usage)
    }

    pub fn from_json(text: &str) -> anyhow::Result<Self> {
        // Serde would take a list for the fields in the order of their declaration.
        if let Some(start @ ('[' | '"' | '0'..='9' | 't' | 'f' | 'n')) =
            text.trim_start().chars().next()
            && serde_json::from_str::<de::IgnoredAny>(text).is_ok()
        {
            bail!("a configuration must be an object, `{{...}}`, but begins with `{start}`");
        }
        serde_json::from_str(text).map_err(|error| {
            if error.is_syntax() || error.is_eof() {
                anyhow::anyhow!("this is not JSON: {error}")
            } else {
                keyvalue::explain(error)
            }
        })
    }

    /// Checks everything that can be checked without looking at the host. An error is one sentence
    /// that names the option, the problem and a way out.
    pub fn check(&self) -> anyhow::Result<()> {
        self.memory.check().map_err(usage)?;
        for (option, uuid) in
            [("smbios uuid=", Some(&self.smbios.uuid)), ("vmgenid ", self.vmgenid.as_ref())]
        {
            if let Some(uuid) = uuid.filter(|uuid| !uuid.is_empty()) {
                Uuid::from_str(uuid)
                    .map_err(|error| usage(anyhow::anyhow!("--{option}{error:#}")))?;
            }
        }
        let conflict = match self {
            Self { vars: Some(_), firmware: None, .. } => "--vars needs --firmware",
            Self { initrd: Some(_), kernel: None, .. } => "--initrd needs --kernel",
            Self { boot, firmware: None, .. } if !boot.0.is_empty() => "--boot needs --firmware",
            Self { cmdline: Some(_), firmware: Some(_), kernel: None, .. } => {
                "--cmdline needs --kernel"
            }
            _ => return Ok(()),
        };
        Err(Failure::new(Status::Usage, conflict))
    }
}

/// Turns an error into a usage error, with its exit status.
#[expect(clippy::needless_pass_by_value, reason = "it is passed to `map_err`")]
fn usage(error: anyhow::Error) -> anyhow::Error {
    Failure::new(Status::Usage, format!("{error:#}"))
}

fn unknown(key: &str) -> anyhow::Error {
    let known: Vec<_> = OPTIONS.iter().map(|option| option.key).collect();
    let hint = suggest(key, &known).map_or_else(
        || "`vmm help run` lists them".into(),
        |near| format!("did you mean --{near}?"),
    );
    Failure::new(Status::Usage, format!("there is no option --{key}: {hint}"))
}

#[cfg(test)]
mod test {
    use super::*;

    fn flags(words: &[(&str, &str)]) -> Config {
        let mut config = Config::default();
        words.iter().for_each(|(key, text)| config.set(key, text).unwrap());
        config
    }

    #[test]
    fn flags_and_json_are_equivalent() {
        let flags = flags(&[
            ("cpus", "8,sockets=2,cores=2,threads=2"),
            ("memory", "3G,prealloc"),
            ("serial", "file:/tmp/log"),
            ("disk", "a.img,readonly"),
            ("disk", "b,,c.img,queues=4,serial=7"),
            ("display", "1920x1080,memory=16M"),
            ("tpm", "/run/tpm,,1"),
            ("device", "serial,port=2"),
            ("vnc", "127.0.0.1:5900,password=secret,view-only"),
            ("vnc", "fd:3"),
            ("control", "fd:4"),
            ("msr", "ignore"),
            ("accept-emulation", ""),
            ("fw-cfg", "opt/a=b"),
            ("boot", "nvme.2, nvme"),
        ]);
        let json = Config::from_json(
            r#"{"cpus": {"count": 8, "sockets": 2, "cores": 2, "threads": 2},
                "memory": {"size": "3G", "prealloc": true}, "serial": "file:/tmp/log",
                "disk": [{"path": "a.img", "readonly": true},
                         {"path": "b,c.img", "queues": 4, "serial": "7"}],
                "display": {"mode": "1920x1080", "memory": "16M"},
                "tpm": {"path": "/run/tpm,1"},
                "device": [{"kind": "serial", "port": 2}], "msr": "ignore",
                "vnc": ["127.0.0.1:5900,password=secret,view-only", {"to": "fd:3"}],
                "control": "fd:4",
                "accept-emulation": true, "fw-cfg": ["opt/a=b"],
                "boot": ["nvme.2", "nvme"]}"#,
        )
        .unwrap();
        assert_eq!(serde_json::to_value(&flags).unwrap(), serde_json::to_value(json).unwrap());
        let short = Config::from_json(r#"{"cpus": 4, "memory": "1G,hugepages=2M"}"#).unwrap();
        assert_eq!((short.cpus.count, short.memory.hugepages), (4, Some(Size(2 << 20))));
        let one = r#"{"vnc": {"to": "127.0.0.1:5900", "view-only": true}}"#;
        let one = Config::from_json(one).unwrap();
        assert_eq!((one.vnc.len(), one.vnc[0].view_only), (1, true));
        for word in ["none", "1920x1080"] {
            let json = Config::from_json(&format!(r#"{{"display": "{word}"}}"#)).unwrap();
            let mut config = Config::default();
            config.set("display", word).unwrap();
            assert_eq!(json.display, config.display);
        }
    }

    #[test]
    fn a_printed_configuration_reads_back() {
        for display in ["none", "1920x1080", "640x480,memory=4M,slot=05.0"] {
            let config = flags(&[
                ("memory", "2G"),
                ("device", "serial,port=2"),
                ("grace", "9"),
                ("die-with", "77"),
                ("display", display),
            ]);
            let text = serde_json::to_string(&config).unwrap();
            assert_eq!(serde_json::to_string(&Config::from_json(&text).unwrap()).unwrap(), text);
        }
    }

    #[test]
    fn mistakes_are_reported_in_one_sentence_with_the_value() {
        let mut config = Config::default();
        let mut error_of = |key, text| format!("{:#}", config.set(key, text).unwrap_err());
        for (key, text, words) in [
            ("memroy", "1G", vec!["memroy", "--memory"]),
            ("memory", "4 gigs", vec!["4 gigs"]),
            ("cpus", "2,socket=2", vec!["socket", "sockets"]),
            ("device", "serail", vec!["serail", "serial"]),
            ("device", "serial,prot=2", vec!["prot", "port"]),
            ("disk", "a.img,qeues=2", vec!["`qeues`", "did you mean `queues`"]),
            ("disk", "a.img,sector=513", vec!["sector=513", "512 or 4096"]),
            ("disk", "readonly=on", vec!["missing key `path`"]),
            ("msr", "ignroe", vec!["ignroe", "ignore"]),
            ("serial", "tcp:1", vec!["tcp:1", "socket:PATH"]),
            ("display", "noen", vec!["noen", "WIDTHxHEIGHT"]),
            ("display", "320x200", vec!["320x200", "from 640x480"]),
            ("display", "1920x1080,memroy=4M", vec!["memroy", "memory"]),
            ("keyboard", "germn", vec!["germn", "write us, gb", "de-DE"]),
            ("keyboard", "ko-KP", vec!["ko-KP", "did you mean ko-KR"]),
            ("vnc", "5900", vec!["`5900`", "HOST:PORT", "unix:PATH"]),
            ("vnc", "unix:/s,viewonly", vec!["viewonly", "view-only"]),
        ] {
            let error = error_of(key, text);
            assert!(words.iter().all(|word| error.contains(word)), "{key} {text}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        for (json, words) in [
            (r#"{"memroy": 1}"#, vec!["memroy", "memory"]),
            (r#"{"cpus": {"core": 1}}"#, vec!["core", "cores"]),
            ("memory=1", vec!["not JSON"]),
            ("", vec!["not JSON"]),
        ] {
            let error = format!("{:#}", Config::from_json(json).unwrap_err());
            assert!(words.iter().all(|word| error.contains(word)), "{json}: {error}");
        }
    }

    #[test]
    fn processor_counts_are_completed_consistently() {
        let settle = |text: &str| keyvalue::parse::<Cpus>(text, Some("count")).unwrap().settle(255);
        assert_eq!(settle("5").unwrap().cores, 5);
        assert_eq!(settle("8,sockets=2,threads=2").unwrap().cores, 2);
        for bad in
            ["0", "100000", "4,cores=3", "5,sockets=2", "4,sockets=0", "4,threads=4294967295"]
        {
            let error = settle(bad).unwrap_err().to_string();
            assert!(error.starts_with("--cpus"), "{error}");
        }
    }
}
