//! The configuration of a machine. One list, many readers: each option is a flag, a key of
//! `--config FILE.json`, a line of `--help` and a row of the reference.

mod boot;
mod built;
mod display;
pub(crate) mod guid;
mod item;
mod meant;
mod served;
mod smbios;

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

pub use self::boot::Order;
pub use self::display::{Absent, Display};
pub use self::item::Item;
use self::meant::meant;
pub use self::smbios::Smbios;
pub use crate::msr::Unknown;
pub use crate::parent::Parent;
use crate::status::{Failure, Status};
use host::keyvalue;
pub use host::keyvalue::edits;
use host::listen::UnixAddress;
use host::size::Size;
use host::uuid::Uuid;
use screen::keys::layout;
use screen::rfb::listen;
use screen::web;

/// An option: its key, what follows the flag, and what it does.
#[derive(Clone, Copy, Debug)]
pub struct Opt {
    /// `--KEY`, and `"KEY"` in JSON.
    pub key: &'static str,
    /// What follows; nothing for a switch.
    pub value: &'static str,
    /// What it does, in one sentence or two.
    pub help: &'static str,
    /// May be given more than once.
    pub repeats: bool,
}

macro_rules! options {
    ($($(#[doc = $help:literal])+ $key:literal $value:literal $field:ident: $type:ty,)*) => {
        /// All that can be said of a machine.
        #[derive(Clone, Debug, Default, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Config {
            $(
                $(#[doc = $help])+
                #[serde(rename = $key, deserialize_with = "word", skip_serializing_if = "unset")]
                pub $field: $type,
            )*
        }

        /// The options, in the order of `--help`.
        pub const OPTIONS: &[Opt] = &[$(Opt {
            key: $key,
            value: $value,
            help: concat!($($help),+),
            repeats: <$type as Word>::REPEATS,
        }),*];

        impl Config {
            /// Sets one option from the command line.
            ///
            /// # Errors
            ///
            /// When there is no such option, or its value does not fit.
            pub fn set(&mut self, key: &str, text: &str) -> anyhow::Result<()> {
                let set = match key {
                    $($key => self.$field.put(text),)*
                    _ => return Err(unknown(key)),
                };
                set.with_context(|| format!("--{key} {text}")).map_err(usage)
            }
        }
    };
}

options! {
    /// Processors. COUNT alone is one socket with that many cores.
    "cpus" "COUNT[,sockets=N][,cores=N][,threads=N]" cpus: Cpus,
    /// Guest memory: a number with K, M, G or T. `hugepages=2M` takes it from hugetlbfs,
    /// `prealloc` takes it all now.
    "memory" "SIZE[,hugepages=SIZE][,prealloc]" memory: Memory,
    /// UEFI firmware: the code half of a stock OVMF image.
    "firmware" "FILE" firmware: Option<PathBuf>,
    /// The firmware's variable store: your own copy of OVMF_VARS, which it writes to.
    "vars" "FILE" vars: Option<PathBuf>,
    /// What firmware boots from, first the first: names of devices as `vmm inspect` tells them, as
    /// in `usb-storage,nvme`. Disks that are not named are not booted. If nothing is said, it is
    /// what the firmware finds, and remembers.
    "boot" "DEVICE[,DEVICE...]" boot: Order,
    /// A Linux kernel: bzImage, or ELF with a PVH entry. It is started directly, or by the firmware
    /// (bzImage only) when there is one.
    "kernel" "FILE" kernel: Option<PathBuf>,
    /// The kernel's initial RAM disk.
    "initrd" "FILE" initrd: Option<PathBuf>,
    /// The kernel's command line.
    "cmdline" "TEXT" cmdline: Option<String>,
    /// The first serial port: `stdio` (Ctrl-A x quits), `file:PATH`, `socket:PATH` or `none`.
    "serial" "TO" serial: Option<Stream>,
    /// The display: what its monitor prefers, which is 1280x800 if nothing is said, and further
    /// keys of the kind `display`; or `none`.
    "display" "none|WIDTHxHEIGHT[,KEY=VALUE...]" display: Display,
    /// The keyboard that the guest believes in, for viewers that send symbols and for `vmm ctl
    /// type`: a language or a culture, as in `de`, `ko` or `fr-CA`; `us` if nothing is said.
    "keyboard" "NAME" keyboard: layout::Name,
    /// A disk: a file or block device. It is of the kind `nvme`, which every system has a driver
    /// for, and has its keys; `--device` has other kinds.
    "disk" "PATH[,KEY=VALUE...]" disk: Vec<disk::Config>,
    /// A TPM 2.0: the control socket of a swtpm that runs, as in `swtpm socket --tpm2 --tpmstate
    /// dir=DIR --ctrl type=unixio,path=PATH`. It is switched off with the machine.
    "tpm" "PATH" tpm: Option<tpm::Config>,
    /// A further device: its kind, then its keys. `vmm help devices` lists them.
    "device" "KIND[,KEY=VALUE...]" device: Vec<registry::Config>,
    /// A Unix socket for `vmm ctl`: status, pause, resume, reset, power button. `fd:N` is one that
    /// was inherited and listens.
    "control" "PATH|fd:N" control: Option<UnixAddress>,
    /// Serve the screen to VNC viewers. A port that other hosts reach needs a password, or the word
    /// `auth=none`. Passwords are the first lines of files; `view-password` is for looking only.
    /// With `tls-cert` viewers must use TLS, and their user name can matter. `view-only`: nobody
    /// may touch. `shared`: nobody gets the screen for themselves. `called`: what messages call the
    /// place. `announced`, for Unix sockets: clients were let in before, and say in a first line
    /// who they are. `fd:N` is a socket that was inherited and listens. Each place has words of its
    /// own.
    "vnc" "HOST:PORT|unix:PATH|fd:N[,password=FILE][,view-password=FILE][,user=NAME]\
           [,tls-cert=FILE,tls-key=FILE][,auth=none][,view-only][,shared][,name=TEXT]\
           [,called=TEXT][,announced]"
    vnc: Vec<listen::Config>,
    /// Serve the screen to web browsers: a page with noVNC. Passwords, TLS and the other words are
    /// as with `vnc`; files with certificates may be replaced at any time. Behind a proxy, `origin`
    /// is what browsers call it, and `proxy` is its address, or a network of such, if it may say
    /// for whom it asks; several of each have blanks between them.
    "web" "HOST:PORT|unix:PATH|fd:N[,password=FILE][,view-password=FILE][,user=NAME]\
           [,tls-cert=FILE,tls-key=FILE][,auth=none][,view-only][,origin=URL][,proxy=ADDRESS]\
           [,name=TEXT]"
    web: Option<web::Config>,
    /// What this process gives up before the guest runs. `auto` (default): all capabilities, the
    /// network namespace and most system calls; files of any path can be named later, if its user
    /// may open them, and root stays root. `on`: also all files but what is open, what lies in the
    /// folders of disks and media, and in `folders`; what this host does not let it give up is a
    /// line of the log. `must`: all of it, or there is no machine; leaving the network namespace
    /// needs CAP_SYS_ADMIN. `user` is who root becomes. `seccomp=log` lets refused system calls
    /// work, and the kernel logs them. `debug` leaves the process open to debuggers and core dumps.
    "jail" "auto|off|on|must[,user=UID[:GID]][,folders=PATH[:PATH...]][,seccomp=on|off|log]\
            [,landlock=on|off][,debug]"
    jail: jail::Config,
    /// Hyper-V enlightenments: `on`, `off`, or `auto`, which is on with firmware where KVM has
    /// them and off for a kernel that is started directly.
    "hyperv" "auto|on|off" hyperv: Hyperv,
    /// Unknown model-specific registers (MSRs): `fault`, `ignore` to read them as zero, or `auto`
    /// (default), which is `ignore` for a guest that is offered Hyper-V and `fault` for any other.
    "msr" "auto|fault|ignore" msr: Unknown,
    /// What SMBIOS tells of the machine.
    "smbios" "[manufacturer=..][,product=..][,version=..][,serial=..][,uuid=..]" smbios: Smbios,
    /// The VM Generation ID, by which a guest learns that it was cloned or restored: a UUID. The
    /// default is derived from the machine's, and so stays the same; `vmm ctl vmgenid` changes it.
    "vmgenid" "UUID" vmgenid: Option<String>,
    /// A file for the guest in fw_cfg: `opt/...=TEXT`, or `opt/...=@FILE`.
    "fw-cfg" "NAME=VALUE" fw_cfg: Vec<Item>,
    /// On SIGTERM, press the power button and wait this long before switching off.
    "grace" "SECONDS" grace: Seconds,
    /// End when the process with this number ends: that of who started it and looks after it.
    "die-with" "PID" die_with: Parent,
    /// Run firmware and kernels although this host's KVM only emulates them.
    "accept-emulation" "" accept_emulation: bool,
}

/// How a type of an option takes a word of the command line.
trait Word: Default + DeserializeOwned {
    const REPEATS: bool = false;
    /// What JSON may say in place of a text.
    const ELSE: &'static str = "a text";

    /// Takes what was typed.
    fn put(&mut self, text: &str) -> anyhow::Result<()>;

    /// Takes an object of JSON.
    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        Self::deserialize(de::value::MapAccessDeserializer::new(map))
    }

    /// Takes a list of JSON.
    fn list<'de, S: SeqAccess<'de>>(list: S) -> Result<Self, S::Error> {
        Self::deserialize(de::value::SeqAccessDeserializer::new(list))
    }
}

/// Reads a JSON value as the command line's word, or as the object that the word stands for.
fn word<'de, D: Deserializer<'de>, T: Word>(deserializer: D) -> Result<T, D::Error> {
    struct Any<T>(std::marker::PhantomData<T>);

    impl<'de, T: Word> Visitor<'de> for Any<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(T::ELSE)
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            let mut value = T::default();
            value.put(text).map_err(|error| E::custom(format!("{error:#}")))?;
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

/// Keeps what is not said out of `vmm inspect --config`.
fn unset<T: Serialize + Default>(value: &T) -> bool {
    serde_json::to_value(value).ok() == serde_json::to_value(T::default()).ok()
}

impl Word for Option<PathBuf> {
    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        anyhow::ensure!(!text.is_empty(), "a path is missing");
        *self = Some(text.into());
        Ok(())
    }
}

impl Word for Option<String> {
    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        *self = Some(text.to_owned());
        Ok(())
    }
}

impl Word for Option<UnixAddress> {
    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        *self = Some(UnixAddress::try_from(text.to_owned()).map_err(anyhow::Error::msg)?);
        Ok(())
    }
}

impl Word for Option<Stream> {
    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        *self = Some(Stream::try_from(text.to_owned()).map_err(anyhow::Error::msg)?);
        Ok(())
    }
}

impl Word for bool {
    const ELSE: &'static str = "true or false";

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        *self = match text {
            "" | "true" | "on" => true,
            "false" | "off" => false,
            _ => bail!("`{text}` is neither true nor false"),
        };
        Ok(())
    }
}

/// Words that are one serde value: `fault`, `auto`.
macro_rules! plain_words {
    ($($type:ty),*) => {$(
        impl Word for $type {
            fn put(&mut self, text: &str) -> anyhow::Result<()> {
                let word = serde_json::Value::from(text);
                *self = serde_json::from_value(word).map_err(keyvalue::explain)?;
                Ok(())
            }
        }
    )*};
}

plain_words!(Unknown, Hyperv, layout::Name, Parent);

/// Words that are `first,key=value`.
macro_rules! flat_words {
    ($($type:ty: $first:expr, $else:literal;)*) => {$(
        impl Word for $type {
            const ELSE: &'static str = $else;

            fn put(&mut self, text: &str) -> anyhow::Result<()> {
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
    jail::Config: Some("mode"), "a word or an object";
}

impl Word for Seconds {
    const ELSE: &'static str = "a number of seconds";

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        let number = text.parse().ok();
        self.0 = number.with_context(|| format!("`{text}` is not a number of seconds"))?;
        Ok(())
    }
}

/// Whole seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seconds(pub u32);

/// Processors and how they are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cpus {
    /// All of them: the product of the rest. 0 while it is not said.
    pub count: u32,
    /// Sockets. Windows desktop editions use one or two.
    pub sockets: u32,
    /// Cores of a socket. 0 while it is not said.
    pub cores: u32,
    /// Threads of a core.
    pub threads: u32,
}

impl Default for Cpus {
    fn default() -> Self {
        Self { count: 1, sockets: 1, cores: 0, threads: 1 }
    }
}

impl Cpus {
    /// Fills in what was not said, and checks that it fits together.
    ///
    /// # Errors
    ///
    /// When it does not.
    pub fn settle(mut self, most: usize) -> anyhow::Result<Self> {
        let Self { count, sockets, cores, threads } = self;
        if count == 0 || sockets == 0 || threads == 0 {
            bail!("--cpus {self}: a machine needs at least one processor, socket and thread");
        }
        if count as usize > most {
            bail!("--cpus {self}: this host's KVM allows at most {most} processors");
        }
        let groups = u64::from(sockets) * u64::from(threads);
        if cores == 0 {
            if u64::from(count) % groups != 0 {
                bail!(
                    "--cpus {self}: {count} processors cannot be shared evenly among {sockets} \
                     sockets with {threads} threads a core"
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
        // What was not said is not repeated.
        for (name, value, unsaid) in
            [("sockets", sockets, 1), ("cores", cores, 0), ("threads", threads, 1)]
        {
            if *value != unsaid {
                write!(f, ",{name}={value}")?;
            }
        }
        Ok(())
    }
}

/// Guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memory {
    /// How much.
    pub size: Size,
    /// In pages of hugetlbfs of this size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepages: Option<Size>,
    /// Take it from the host now, not when the guest first touches it.
    pub prealloc: bool,
}

impl Default for Memory {
    fn default() -> Self {
        Self { size: Size(512 << 20), hugepages: None, prealloc: false }
    }
}

impl Memory {
    fn check(&self) -> anyhow::Result<()> {
        // OVMF works at 8 MiB and up, and a kernel with its initial RAM disk needs some tens.
        const LEAST: u64 = 16 << 20;
        if self.size.0 < LEAST {
            let size = self.size;
            bail!("--memory {size}: a machine needs at least 16M, and 4 GiB are written 4G");
        }
        if !self.size.0.is_multiple_of(1 << 20) {
            bail!("--memory {}: it is counted in whole MiB", self.size);
        }
        Ok(())
    }
}

/// Whether the guest sees Hyper-V's leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hyperv {
    /// With firmware, where KVM has them.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Config {
    /// Whether somebody may look at the screen at any time.
    pub fn is_watched(&self) -> bool {
        !self.vnc.is_empty() || self.web.is_some()
    }

    /// Reads a configuration file.
    ///
    /// # Errors
    ///
    /// When it cannot be read, is not JSON, or has a key that does not exist.
    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let file = fs::File::open(path).with_context(|| format!("configuration {name}"));
        Self::from_reader(file.map_err(usage)?, &name)
    }

    /// Reads a configuration to its end; the name is for people.
    ///
    /// # Errors
    ///
    /// As `from_file`.
    pub fn from_reader(mut from: impl Read, name: &str) -> anyhow::Result<Self> {
        let mut text = String::new();
        let read = from.read_to_string(&mut text).map_err(anyhow::Error::from);
        let config = read.and_then(|_| Self::from_json(&text));
        config.with_context(|| format!("configuration {name}")).map_err(usage)
    }

    /// Reads a configuration.
    ///
    /// # Errors
    ///
    /// When it is not JSON, or has a key that does not exist.
    pub fn from_json(text: &str) -> anyhow::Result<Self> {
        // A list would be taken for the fields in their order.
        if let Some(start @ ('[' | '"' | '0'..='9' | 't' | 'f' | 'n')) =
            text.trim_start().chars().next()
            && serde_json::from_str::<de::IgnoredAny>(text).is_ok()
        {
            bail!("a configuration is an object, `{{...}}`, and this begins with `{start}`");
        }
        serde_json::from_str(text).map_err(|error| {
            if error.is_syntax() || error.is_eof() {
                anyhow::anyhow!("this is not JSON: {error}")
            } else {
                keyvalue::explain(error)
            }
        })
    }

    /// Checks what can be checked without the host.
    ///
    /// # Errors
    ///
    /// One sentence that names the option, what is wrong, and the way out.
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

/// An error in what the user wrote.
#[expect(clippy::needless_pass_by_value, reason = "it is passed to `map_err`")]
fn usage(error: anyhow::Error) -> anyhow::Error {
    Failure::new(Status::Usage, format!("{error:#}"))
}

fn unknown(key: &str) -> anyhow::Error {
    let known: Vec<_> = OPTIONS.iter().map(|option| option.key).collect();
    let hint = meant(key, &known).map_or_else(
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
    fn flags_and_json_say_the_same() {
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
            let mut said = Config::default();
            said.set("display", word).unwrap();
            assert_eq!(json.display, said.display);
        }
    }

    #[test]
    fn what_is_printed_reads_back() {
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
    fn mistakes_are_one_sentence_that_names_the_value() {
        let mut config = Config::default();
        let mut said = |key, text| format!("{:#}", config.set(key, text).unwrap_err());
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
            let said = said(key, text);
            assert!(words.iter().all(|word| said.contains(word)), "{key} {text}: {said}");
            assert!(!said.contains('\n'), "{said}");
        }
        for (json, words) in [
            (r#"{"memroy": 1}"#, vec!["memroy", "memory"]),
            (r#"{"cpus": {"core": 1}}"#, vec!["core", "cores"]),
            ("memory=1", vec!["not JSON"]),
            ("", vec!["not JSON"]),
        ] {
            let said = format!("{:#}", Config::from_json(json).unwrap_err());
            assert!(words.iter().all(|word| said.contains(word)), "{json}: {said}");
        }
    }

    #[test]
    fn processors_fit_together() {
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
