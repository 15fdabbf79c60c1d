//! Installation media and the set-up disk, beside the tools with which the reference image does the
//! same: 7z, wimlib-imagex, genisoimage and mtools.
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use container::media::Extent;
use container::media::testutil::{wim_parts, windows_11};
use container::setup_disk::{Content, Item, SetupDisk, lay_out};
use host::testutil::noise::Noise;
use rustix::fs::{Advice, fadvise};
use transom_benches::rival::release;
use transom_benches::table::{Samples, measured, print, rows_table};

const WIM: u64 = 6 << 30;
/// Rounds of what copies the whole medium take long.
const ROUNDS: usize = 3;
const DISK_ROUNDS: usize = 5;
/// All files of virtio-win for one Windows would be less than a tenth of this.
const DRIVERS: usize = 400;
const DRIVER: usize = 508 * (1 << 20) / DRIVERS;

/// Its files, and their places on the medium, as Microsoft has them.
const MEDIUM: &str = r"
mkdir -p tree/boot tree/efi/microsoft/boot tree/sources
head -c 4096 /dev/urandom > tree/boot/etfsboot.com
for name in efisys efisys_noprompt; do
  head -c 1474560 /dev/urandom > tree/efi/microsoft/boot/$name.bin
done
mv install.wim tree/sources
";
/// `$1` is the image that firmware starts. Holes stay holes.
const BUILD: &str = r"
genisoimage -quiet -udf -allow-limited-size -iso-level 3 -b boot/etfsboot.com -no-emul-boot \
  -boot-load-size 8 -eltorito-alt-boot -e efi/microsoft/boot/$1 -no-emul-boot -boot-load-size 1 \
  tree 2> genisoimage.log | dd bs=1M iflag=fullblock conv=sparse status=none of=$2
";
const DESCRIBE: &str = r"
rm -rf out
7z x -bso0 -bsp0 -oout custom.iso sources/install.wim
wimlib-imagex info out/sources/install.wim --xml > out/images.xml
";
const REBUILD: &str = r"
rm -rf tree
7z x -bso0 -bsp0 -otree custom.iso
";
const MTOOLS: &str = r"
rm -f setup.img
truncate -s 1G setup.img
mformat -i setup.img -F -v SETUP ::
mcopy -s -i setup.img drivers/* ::
";

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let programs = release(&["container"])?;
    medium(folder.path())?;
    describe(folder.path(), &programs)?;
    fs::remove_dir_all(folder.path().join("out")).ok();
    set_up(folder.path())
}

/// A medium of 6 GiB, most of which are holes.
fn medium(folder: &Path) -> Result<()> {
    let (header, xml) = wim_parts(WIM, &windows_11(9));
    let mut file = File::create(folder.join("install.wim"))?;
    file.write_all(&header)?;
    file.write_all_at(&xml, WIM - xml.len() as u64)?;
    shell(MEDIUM, folder, &[])?;
    shell(BUILD, folder, &["efisys.bin", "custom.iso"]).map(drop)
}

/// Runs a script. Returns its seconds and the peak memory of its largest program in MiB.
fn shell(script: &str, folder: &Path, words: &[&str]) -> Result<(f64, f64)> {
    let script = format!("set -e -o pipefail\n{script}");
    run(Command::new("bash").args(["-c", &script, "script"]).args(words), folder)
}

fn run(command: &mut Command, folder: &Path) -> Result<(f64, f64)> {
    let peak = folder.join("peak");
    let mut timed = Command::new("/usr/bin/time");
    timed.args(["-q", "-f", "%M", "-o"]).arg(&peak).arg(command.get_program());
    timed.args(command.get_args()).current_dir(folder).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        value.map(|value| timed.env(name, value));
    }
    let start = Instant::now();
    let output = timed.output().context("/usr/bin/time")?;
    let seconds = start.elapsed().as_secs_f64();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    // Without a usable KVM, the plan ends with this status after its description.
    ensure!(matches!(output.status.code(), Some(0 | 88)), "{said}");
    let kib: f64 = fs::read_to_string(&peak)?.trim().parse().context("the peak memory")?;
    Ok((seconds, kib / 1024.0))
}

/// Finds out what the medium installs, and makes one that starts without a key.
fn describe(folder: &Path, programs: &Path) -> Result<()> {
    let rows = [
        ("transom plan", "what it installs, and the patch that asks for no key"),
        ("7z, wimlib", "what it installs"),
        ("7z, genisoimage", "a medium that asks for no key"),
    ];
    let [mut times, mut peaks] = [const { [const { Samples::new() }; 3] }; 2];
    for round in 0..=ROUNDS {
        for (at, (name, _)) in rows.iter().enumerate() {
            let done = match at {
                0 => {
                    let mut plan = Command::new(programs.join("transom"));
                    run(plan.arg("plan").env("STORAGE", folder).env("RAM_CHECK", "N"), folder)
                }
                1 => shell(DESCRIBE, folder, &[]),
                _ => shell(&format!("{REBUILD}{BUILD}"), folder, &["efisys_noprompt.bin", "new"]),
            };
            let name = if at == 0 { transom_benches::rival::OURS } else { name };
            let both = [&mut times[at], &mut peaks[at]];
            let Some((seconds, mib)) = measured(name, both, done)? else { continue };
            // The first round warms up caches.
            if round > 0 {
                times[at].push(seconds * 1e3);
                peaks[at].push(mib);
            }
        }
    }
    print(&rows_table("medium of 6 GiB: time", "ms", &rows, &times));
    print(&format!("\n{}", rows_table("medium of 6 GiB: peak memory", "MiB", &rows, &peaks)));
    Ok(())
}

/// The set-up disk with 508 MiB of drivers: ours from ranges of an ISO image, theirs from files.
fn set_up(folder: &Path) -> Result<()> {
    let mut noise = Noise::new(1);
    let drivers = folder.join("drivers");
    fs::create_dir(&drivers)?;
    let mut options = File::options();
    let options = options.read(true).write(true).create_new(true);
    let bundle = Arc::new(options.open(folder.join("bundle.iso"))?);
    let mut files = vec![bundle.clone()];
    for number in 0..DRIVERS {
        let block: Vec<u8> = noise.by_ref().take(4096).collect();
        let bytes: Vec<u8> = block.into_iter().cycle().take(DRIVER).collect();
        bundle.write_all_at(&bytes, (number * DRIVER) as u64)?;
        let path = drivers.join(format!("driver-{number}.sys"));
        fs::write(&path, bytes)?;
        files.push(Arc::new(File::open(path)?));
    }
    let rows = [
        ("transom", "in memory, files in the page cache"),
        ("mtools", "in a file, files in the page cache"),
        ("transom, cold", "files on the disk"),
        ("mtools, cold", "files on the disk"),
    ];
    let mut all = [const { Samples::new() }; 4];
    for round in 0..=DISK_ROUNDS {
        for (at, samples) in all.iter_mut().enumerate() {
            if at >= 2 {
                forget(&files)?;
            }
            let done = match at % 2 {
                0 => ours(&bundle),
                _ => shell(MTOOLS, folder, &[]).map(|(seconds, _)| seconds),
            };
            let name = if at % 2 == 0 { transom_benches::rival::OURS } else { "mtools" };
            let Some(seconds) = measured(name, [&mut *samples], done)? else { continue };
            if round > 0 {
                samples.push(seconds * 1e3);
            }
        }
    }
    print(&format!("\n{}", rows_table("set-up disk of 508 MiB", "ms", &rows, &all)));
    Ok(())
}

/// Makes the set-up disk. Returns its seconds.
fn ours(bundle: &Arc<File>) -> Result<f64> {
    let item = |number: usize| Item {
        path: format!("$WinPEDriver$/driver-{number}.sys"),
        content: Some(Content::Ranges {
            file: bundle.clone(),
            extents: vec![Extent { start: (number * DRIVER) as u64, length: DRIVER as u64 }],
        }),
        modified: SystemTime::now(),
    };
    let start = Instant::now();
    let disk = SetupDisk::write(&lay_out((0..DRIVERS).map(item).collect())?)?;
    let seconds = start.elapsed().as_secs_f64();
    disk.close().free()?;
    Ok(seconds)
}

/// Drops files from the page cache.
fn forget(files: &[Arc<File>]) -> Result<()> {
    for file in files {
        file.sync_all()?;
        fadvise(file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}
