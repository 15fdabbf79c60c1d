//! CDs with the layout of Microsoft's, made by other people's programs.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use container::media::testutil::wim_parts;
use container::media::{Image, Opened};

use crate::programs::run;

/// Bytes of each EFI boot image.
pub(crate) const BOOT_IMAGE: usize = 64 << 10;

/// A WIM of `length` bytes with these images. Its XML data is at its end, as in Microsoft's.
pub(crate) fn wim(path: &Path, length: u64, images: &[String]) {
    let (header, xml) = wim_parts(length, images);
    let mut file = File::create(path).unwrap();
    file.write_all(&header).unwrap();
    file.write_all_at(&xml, length - xml.len() as u64).unwrap();
}

/// A folder with the files of a CD. `fill` makes the WIM at the path.
pub(crate) fn tree(folder: &Path, fill: impl FnOnce(&Path)) -> PathBuf {
    let tree = folder.join("tree");
    for folder in ["boot", "efi/microsoft/boot", "sources"] {
        fs::create_dir_all(tree.join(folder)).unwrap();
    }
    let noise = |seed: usize, length| (0..length).map(move |at| (at * seed / 8).to_le_bytes()[0]);
    let put = |name: &str, bytes: Vec<u8>| fs::write(tree.join(name), bytes).unwrap();
    put("boot/etfsboot.com", noise(3, 4096).collect());
    put("efi/microsoft/boot/efisys.bin", noise(5, BOOT_IMAGE).collect());
    put("efi/microsoft/boot/efisys_noprompt.bin", noise(7, BOOT_IMAGE).collect());
    // A directory of several sectors.
    for number in 0..300 {
        put(&format!("sources/a-rather-long-name-{number}.dll"), vec![1]);
    }
    fill(&tree.join("sources/install.wim"));
    tree
}

/// The boot images, as Microsoft's media have them.
const BOOT: &[&str] = &[
    "-b",
    "boot/etfsboot.com",
    "-no-emul-boot",
    "-boot-load-size",
    "8",
    "-eltorito-alt-boot",
    "-e",
    "efi/microsoft/boot/efisys.bin",
    "-no-emul-boot",
    "-boot-load-size",
    "1",
];

/// A UDF bridge of genisoimage. Zeros become holes.
pub(crate) fn bridge(folder: &Path) -> PathBuf {
    let path = folder.join("cd.iso");
    let limits = ["-quiet", "-udf", "-allow-limited-size", "-iso-level", "3", "-V", "CCSA_X64FRE"];
    let mut tool = Command::new("genisoimage");
    tool.args(limits).args(BOOT).arg("tree").current_dir(folder);
    let mut tool = tool.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut sparse = Command::new("dd");
    sparse.args(["bs=1M", "iflag=fullblock", "conv=sparse", "status=none"]);
    sparse.arg(format!("of={}", path.display())).stdin(tool.stdout.take().unwrap());
    assert!(sparse.status().unwrap().success() && tool.wait().unwrap().success());
    path
}

/// A CD of xorriso: ISO 9660 with Joliet.
pub(crate) fn joliet(folder: &Path) -> PathBuf {
    let path = folder.join("cd.iso");
    fs::remove_file(&path).ok();
    let start =
        ["-as", "mkisofs", "-quiet", "-J", "-joliet-long", "-iso-level", "3", "-o", "cd.iso"];
    run("xorriso", &[&start[..], BOOT, &["tree"]].concat(), folder);
    path
}

/// Sectors of the boot images, first BIOS, then UEFI, as xorriso reads the catalog.
pub(crate) fn boot_sectors(path: &Path, folder: &Path) -> Vec<u64> {
    let path = path.display().to_string();
    let text = run("xorriso", &["-indev", &path, "-report_el_torito", "plain"], folder);
    let lines = text.lines().filter(|line| line.starts_with("El Torito boot img"));
    lines.map(|line| line.split_whitespace().last().unwrap().parse().unwrap()).collect()
}

/// Counts what is read.
pub(crate) struct Counted {
    image: Opened,
    pub(crate) bytes: std::cell::Cell<usize>,
}

impl Counted {
    pub(crate) fn open(path: &Path) -> Self {
        Self { image: Opened::open(path).unwrap(), bytes: 0.into() }
    }
}

impl Image for Counted {
    fn length(&self) -> u64 {
        self.image.length()
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> anyhow::Result<()> {
        self.bytes.set(self.bytes.get() + buffer.len());
        self.image.read(buffer, offset)
    }
}
