//! Configuration of a disk, and how a disk is opened.

use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::backing::BackingFile;
use super::format::{Format, choose};
use super::full::RetryWhenFull;
use super::limit::Limited;
use super::medium::{Medium, Report};
use super::overlay::Overlay;
use super::patch::{Changes, Patched};
use super::raw::{Raw, check_size, open_locked};
use super::rings::Rings;
use super::threads::Threaded;
use super::uring::Ring;
use super::{Channel, Drive, Geometry, Holds, Image, LockedFile, qcow2};
use crate::fnv;
use crate::memory::Memory;
use crate::pci::Address;
use crate::size::Size;

/// The keys of a disk. They are the same for every controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The disk image or block device.
    pub path: PathBuf,
    /// `raw` or `qcow2`. Defaults to `qcow2` for a file name that ends in .qcow2, and to `raw` for
    /// every other. The content is never used to detect the format, because the guest can write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Minimum size. A smaller file grows when the machine is switched on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// The guest cannot write. Several machines may share a read-only disk.
    #[serde(default)]
    pub readonly: bool,
    /// Direct I/O, which bypasses the host's page cache: `on`, `off`, or `auto`, which uses it
    /// where the file system supports it.
    #[serde(default)]
    pub direct: Direct,
    /// Bytes of the guest's sectors: 4096, or 512, which still reports 4096 as the preferred size.
    #[serde(default)]
    pub sector: Sector,
    /// Maximum number of requests per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Maximum number of bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
    /// Space that the guest discards is returned to the host.
    #[serde(default = "yes")]
    pub discard: bool,
    /// `on`: writes go to memory and are lost when the machine ends. The file is only read. Or
    /// patches of a read-only disk, as `OFFSET:OLD:NEW+...` with bytes in hexadecimal: the guest
    /// reads NEW where the file has OLD.
    #[serde(default)]
    pub overlay: Changes,
    /// `on` allows the backing file of a qcow2 image to be in any folder. Otherwise it must be in
    /// the image's own folder, because its name comes from the image, which may not be trusted. Or
    /// the path of the backing file, whatever the image names; its format follows from its name.
    #[serde(default)]
    pub backing: BackingFile,
    /// PCI slot of the controller. Defaults to the first free slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
    /// Number of queues of the controller. Defaults to one for each processor, at most 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Serial number by which the guest recognizes the disk: at most 20 ASCII characters. Defaults
    /// to one that is derived from the file's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// The file that is expected at the path.
    #[serde(skip)]
    pub file: Expected,
}

/// Identity of a file that does not depend on its name: device and inode, as `DEV:INODE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FileId {
    pub device: u64,
    pub inode: u64,
}

impl FileId {
    pub fn of(found: &Metadata) -> Self {
        Self { device: found.dev(), inode: found.ino() }
    }
}

impl TryFrom<String> for FileId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let pair = text.split_once(':');
        let pair = pair.and_then(|(device, inode)| Some((device.parse(), inode.parse().ok()?)));
        let Some((Ok(device), inode)) = pair else {
            return Err(format!("`{text}` is not a file identity: write DEV:INODE, two numbers"));
        };
        Ok(Self { device, inode })
    }
}

impl From<FileId> for String {
    fn from(FileId { device, inode }: FileId) -> Self {
        format!("{device}:{inode}")
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    #[default]
    Any,
    /// Opening any other file is an error.
    Only(FileId),
    /// No file: the machine is only inspected. The file is not opened and need not exist.
    Nothing,
}

/// Used where the number of processors is unknown.
const DEFAULT_QUEUES: u16 = 4;
/// More queues than this do not make any guest faster. Users may still configure more.
const MAX_SUITABLE_QUEUES: u16 = 16;
const MAX_SERIAL: usize = 20;

fn yes() -> bool {
    true
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direct {
    /// If the file system supports direct I/O.
    #[default]
    Auto,
    /// Always. Opening fails if the file system does not support it.
    On,
    Off,
}

/// The logical sector size: the smallest read or write of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub enum Sector {
    /// 512 bytes, which every guest supports.
    #[default]
    Bytes512,
    /// 4096 bytes, "4Kn".
    Bytes4096,
}

impl Sector {
    pub fn bytes(self) -> u32 {
        match self {
            Self::Bytes512 => 512,
            Self::Bytes4096 => 4096,
        }
    }
}

impl From<Sector> for u32 {
    fn from(sector: Sector) -> Self {
        sector.bytes()
    }
}

impl TryFrom<u32> for Sector {
    type Error = String;

    fn try_from(bytes: u32) -> Result<Self, String> {
        match bytes {
            512 => Ok(Self::Bytes512),
            4096 => Ok(Self::Bytes4096),
            other => Err(format!("sectors of {other} bytes are not supported: use 512 or 4096")),
        }
    }
}

impl Config {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            format: None,
            size: None,
            readonly: false,
            direct: Direct::default(),
            sector: Sector::default(),
            iops: None,
            bandwidth: None,
            discard: true,
            overlay: Changes::None,
            backing: BackingFile::OwnFolder,
            slot: None,
            queues: None,
            serial: None,
            file: Expected::Any,
        }
    }

    /// Sets the number of queues to what this many processors can use, unless it is configured.
    pub fn set_default_queues(&mut self, processors: u16) {
        self.queues.get_or_insert(processors.clamp(1, MAX_SUITABLE_QUEUES));
    }

    pub fn open(&self, holds: Holds) -> anyhow::Result<Arc<dyn Image>> {
        if self.file == Expected::Nothing {
            return Ok(super::memory(self.sector.bytes().into()));
        }
        open(self, Some(holds))
    }

    /// Wraps an open disk for operators, who use the controller's name.
    pub fn drive(&self, image: Arc<dyn Image>, name: &str) -> anyhow::Result<Arc<Drive>> {
        Ok(Arc::new(Drive::new(name, self.serial()?, &self.path, image)))
    }

    pub fn queues(&self) -> u16 {
        self.queues.unwrap_or(DEFAULT_QUEUES)
    }

    /// The configured serial number, or one that is derived from the path.
    pub fn serial(&self) -> anyhow::Result<String> {
        let Some(serial) = &self.serial else {
            let name = self.path.as_os_str().as_bytes();
            return Ok(format!("TR{:016X}", fnv::hash(name, 0)));
        };
        let printable = !serial.is_empty() && serial.bytes().all(|it| matches!(it, b' '..=b'~'));
        ensure!(
            printable && serial.len() <= MAX_SERIAL,
            "`serial={serial}` is not a serial number: write 1 to {MAX_SERIAL} ASCII characters"
        );
        Ok(serial.clone())
    }

    /// The format by which it is opened.
    pub fn format(&self) -> Format {
        self.format.unwrap_or_else(|| Format::of_name(&self.path))
    }

    /// Whether nothing is written to the file.
    pub fn is_read_only(&self) -> bool {
        self.readonly || self.overlay != Changes::None
    }
}

/// Opens and locks a disk, and adds the layers of its configuration: an overlay, waiting for free
/// space, rate limits.
pub fn open(config: &Config, holds: Option<Holds>) -> anyhow::Result<Arc<dyn Image>> {
    let name = config.path.display().to_string();
    for (key, limit) in [("iops", config.iops), ("bandwidth", config.bandwidth.map(|it| it.0))] {
        ensure!(limit != Some(0), "`{key}=0` would block the disk: leave it out for no limit");
    }
    let opened = open_locked(&config.path, config.is_read_only())?;
    if let Expected::Only(file) = config.file {
        ensure!(FileId::of(&opened.found) == file, "{name} was replaced before it was opened");
    }
    let image: Arc<dyn Image> = match choose(config.format, &config.path, &opened.file)? {
        Format::Raw => {
            let named = matches!(config.backing, BackingFile::This(_));
            ensure!(!named, "{name}: only qcow2 images have a backing file: leave `backing` out");
            let raw = Arc::new(Raw::new(opened, config)?);
            check_size(&config.path, raw.geometry().size, config.sector.bytes())?;
            match changed(&name, raw.clone(), config)? {
                Some(image) => image,
                None => Arc::new(File::new(raw, &name, config.queues())),
            }
        }
        Format::Qcow2 => {
            let image = Arc::new(qcow2::open(opened, config).with_context(|| name.clone())?);
            let above = match changed(&name, image.clone(), config)? {
                Some(above) => above,
                None => Arc::new(Threaded::new(&name, image.clone(), 2)),
            };
            Arc::new(qcow2::Disk { image, above })
        }
    };
    if let Some(size) = config.size.filter(|size| size.0 > image.geometry().size) {
        image.grow(Some(size.0)).with_context(|| format!("{name}: size={size}"))?;
    }
    let image: Arc<dyn Image> = if config.is_read_only() {
        image
    } else {
        Arc::new(RetryWhenFull::new(image, &config.path, holds))
    };
    Ok(match (config.iops, config.bandwidth) {
        (None, None) => image,
        (iops, bandwidth) => Arc::new(Limited::new(image, iops, bandwidth.map(|it| it.0))),
    })
}

/// The layer of the changes that the configuration has. `None` if it has none.
fn changed(
    name: &str,
    base: Arc<dyn Medium>,
    config: &Config,
) -> anyhow::Result<Option<Arc<dyn Image>>> {
    let image = match &config.overlay {
        Changes::None => return Ok(None),
        Changes::Writes => {
            let overlay = Overlay::over(base, config.readonly);
            Threaded::new(name, Arc::new(overlay), 2).in_memory()
        }
        Changes::Patches(patches) => {
            let patched = Patched::new(base, patches).with_context(|| name.to_owned())?;
            Threaded::new(name, Arc::new(patched), 2)
        }
    };
    Ok(Some(Arc::new(image)))
}

/// A raw disk. It uses io_uring if the host allows that, and threads otherwise.
pub(super) struct File {
    raw: Arc<Raw>,
    report: Arc<Report>,
    /// Created before the guest runs: in its jail the process cannot create more.
    rings: Option<Arc<Rings>>,
}

/// Threads per channel without io_uring.
const THREADS: usize = 4;
/// The minimum and maximum number of rings, whatever is configured, without the ring for flushes.
const QUEUE_RANGE: (u16, u16) = (2, 64);

impl File {
    fn new(raw: Arc<Raw>, name: &str, queues: u16) -> Self {
        // One more ring, which controllers use to flush.
        let found = Rings::new(&raw.file, queues.clamp(QUEUE_RANGE.0, QUEUE_RANGE.1) + 1);
        if let Err(reason) = &found {
            tracing::info!(disk = name, "using {THREADS} threads instead of io_uring: {reason}");
        }
        Self { raw, report: Arc::new(Report::new(name)), rings: found.ok().map(Arc::new) }
    }

    /// The same disk as on a host without io_uring.
    #[cfg(test)]
    pub(super) fn by_threads(config: &Config) -> anyhow::Result<Arc<dyn Image>> {
        let raw = Raw::new(open_locked(&config.path, config.is_read_only())?, config)?;
        let report = Arc::new(Report::new("threads"));
        Ok(Arc::new(Self { raw: Arc::new(raw), report, rings: None }))
    }
}

impl Image for File {
    fn geometry(&self) -> Geometry {
        self.raw.geometry()
    }

    fn complete(&self) -> io::Result<()> {
        self.raw.sync()
    }

    fn file(&self) -> Option<LockedFile> {
        Some(self.raw.locked())
    }

    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        let (raw, report) = (self.raw.clone(), self.report.clone());
        // If no ring is left and no more can be created, threads do the work.
        match self.rings.as_ref().and_then(|rings| rings.lease(&raw.file).ok()) {
            Some(ring) => Ok(Box::new(Ring::new(ring, raw, report, memory))),
            None => Threaded::with_report(raw, report, THREADS).channel(memory),
        }
    }

    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        self.raw.grow(size)
    }
}

#[cfg(test)]
mod test {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::super::rehearsal::sparse;
    use super::*;

    /// Opens an invalid disk. Returns the error, which must be one sentence that names the file.
    fn refusal(config: &Config) -> String {
        let Err(error) = open(config, None) else { panic!("{config:?} was opened") };
        let said = format!("{error:#}");
        assert!(said.contains(&config.path.display().to_string()), "{said}");
        assert!(!said.contains('\n') && !said.contains("os error 22"), "{said}");
        said
    }

    fn written(folder: &Path, name: &str, head: &[u8]) -> Config {
        let path = folder.join(name);
        let mut bytes = head.to_vec();
        bytes.resize(4096, 0);
        fs::write(&path, bytes).unwrap();
        Config::new(path)
    }

    #[test]
    fn explains_file_errors_and_their_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let said = refusal(&Config::new(folder.path().join("none")));
        assert!(said.contains("does not exist: `truncate -s 64G "), "{said}");
        let said = refusal(&Config::new(folder.path()));
        assert!(said.contains("is a folder"), "{said}");
        let said = refusal(&Config::new("/dev/null"));
        assert!(said.contains("neither a file nor a block device"), "{said}");
        let said = refusal(&Config::new(sparse(&folder, "empty", 0)));
        assert!(said.contains("has 0 bytes: `truncate -s 64G "), "{said}");
        let said = refusal(&Config::new(sparse(&folder, "cut", 1000)));
        assert!(said.contains("1000 bytes, which are not whole sectors of 512"), "{said}");
        let half = sparse(&folder, "half", 4096 + 512);
        let said = refusal(&Config { sector: Sector::Bytes4096, ..Config::new(half) });
        assert!(said.contains("not whole sectors of 4096"), "{said}");
        let whole = sparse(&folder, "whole", 4096);
        let said = open(&Config { iops: Some(0), ..Config::new(&whole) }, None).err().unwrap();
        assert!(said.to_string().contains("`iops=0`"), "{said}");
    }

    #[test]
    fn refuses_foreign_image_formats_with_advice() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        for (head, kind) in [
            (&b"KDMV\x01"[..], "vmdk"),
            (b"# Disk DescriptorFile\n", "vmdk"),
            (b"vhdxfile", "vhdx"),
            (b"conectix", "vpc"),
        ] {
            let config = written(folder, "foreign", head);
            let said = refusal(&config);
            assert!(said.contains(&format!("`qemu-img convert -f {kind} -O raw ")), "{said}");
            // An explicit `format=raw` is obeyed.
            open(&Config { format: Some(Format::Raw), ..config }, None).unwrap();
        }
        let mut vdi = [0; 0x44];
        vdi[0x40..].copy_from_slice(&[0x7f, 0x10, 0xda, 0xbe]);
        assert!(refusal(&written(folder, "foreign", &vdi)).contains("vdi"));
    }

    #[test]
    fn guest_writes_do_not_turn_a_raw_disk_into_qcow2() {
        let folder = tempfile::tempdir().unwrap();
        let config = written(folder.path(), "disk.img", b"QFI\xfb\0\0\0\x03");
        let said = refusal(&config);
        assert!(said.contains("`format=qcow2` if it is one, or `format=raw`"), "{said}");
        let raw = Config { format: Some(Format::Raw), ..config };
        assert_eq!(open(&raw, None).unwrap().geometry().size, 4096);
        let said = refusal(&written(folder.path(), "disk.qcow2", b"boot"));
        assert!(said.contains("is not a qcow2 image, despite its name"), "{said}");
        let plain = written(folder.path(), "plain", b"boot");
        let said = refusal(&Config { format: Some(Format::Qcow2), ..plain });
        assert!(said.contains("is not a qcow2 image: leave"), "{said}");
    }

    #[test]
    fn a_disk_has_one_writer_or_many_readers() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config::new(sparse(&folder, "disk", 1 << 20));
        let reader = Config { readonly: true, ..config.clone() };
        let overlay = Config { overlay: Changes::Writes, ..config.clone() };
        let holder = format!("is in use by process {} (", std::process::id());
        let one = open(&config, None).unwrap();
        for other in [&config, &reader, &overlay] {
            assert!(refusal(other).contains(&holder), "{}", refusal(other));
        }
        let memory = super::super::driver::ram();
        let channel = one.channel(&memory).unwrap();
        drop(one);
        assert!(refusal(&config).contains(&holder), "a channel is the disk too");
        drop(channel);
        let readers = (open(&reader, None).unwrap(), open(&overlay, None).unwrap());
        assert!(refusal(&config).contains(&holder));
        drop(readers);
        open(&config, None).unwrap();
    }

    #[test]
    fn reports_missing_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let path = sparse(&folder, "disk", 4096);
        fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
        // Root may open everything. This thread drops the capability and ends afterwards.
        let body = move || {
            let own = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(own);
            set_capabilities(None, sets).unwrap();
            let said = refusal(&Config::new(&path));
            assert!(said.contains("no permission to open"), "{said}");
            assert!(said.contains("`readonly`"), "{said}");
            open(&Config { readonly: true, ..Config::new(&path) }, None).unwrap();
        };
        std::thread::spawn(body).join().unwrap();
    }

    #[test]
    fn geometry_matches_the_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let path = sparse(&folder, "disk", 1 << 20);
        let geometry = open(&Config::new(&path), None).unwrap().geometry();
        assert_eq!((geometry.logical_block, geometry.physical_block), (512, 4096));
        assert!(!geometry.read_only && geometry.discard >= 4096, "{geometry:?}");
        let config = Config { sector: Sector::Bytes4096, discard: false, ..Config::new(&path) };
        let geometry = open(&config, None).unwrap().geometry();
        assert_eq!((geometry.logical_block, geometry.discard), (4096, 0));
        let config = Config { readonly: true, ..Config::new(&path) };
        let geometry = open(&config, None).unwrap().geometry();
        assert!(geometry.read_only && geometry.discard == 0, "{geometry:?}");
    }

    #[test]
    fn parses_standalone_and_flattened_into_a_controller() {
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Controller {
            #[serde(flatten)]
            disk: Config,
            #[serde(default)]
            serial: Option<String>,
        }
        let text = r#"{"path":"a.img","format":"raw","direct":"on","sector":4096,"iops":100,
            "bandwidth":"10M","discard":false"#;
        let alone: Config = serde_json::from_str(&format!("{text}}}")).unwrap();
        assert_eq!((alone.direct, alone.sector), (Direct::On, Sector::Bytes4096));
        assert_eq!((alone.iops, alone.bandwidth), (Some(100), Some(Size(10 << 20))));
        let among: Controller = serde_json::from_str(&format!(r#"{text},"serial":"x"}}"#)).unwrap();
        assert_eq!((among.disk, among.serial.as_deref()), (alone.clone(), Some("x")));
        let again: Config = serde_json::from_value(serde_json::to_value(&alone).unwrap()).unwrap();
        assert_eq!(again, alone);
        for bad in [r#""path":"a","sector":1024"#, r#""path":"a","forma":"raw""#, r#""sector":512"#]
        {
            let bad = format!("{{{bad}}}");
            assert!(serde_json::from_str::<Config>(&bad).is_err(), "{bad}");
            assert!(serde_json::from_str::<Controller>(&bad).is_err(), "{bad}");
        }
        let plain: Config = serde_json::from_str(r#"{"path":"a"}"#).unwrap();
        assert_eq!(plain, Config::new("a"));
    }
}
