//! Mistakes of users: each ends the pod with one sentence that says what to do, and with the exit
//! status of the reference image.

use anyhow::{Result, ensure};
use transom_tests::place::last_line;
use transom_tests::program::PATIENCE;

use super::runs_here;
use super::server::serve;
use super::world::{Files, World, each};

struct Mistake {
    /// A script in the volume.
    volume: &'static str,
    /// A script in the pod's mounts and network.
    place: &'static str,
    words: &'static [(&'static str, &'static str)],
    status: i32,
    sentence: &'static str,
}

type Words = &'static [(&'static str, &'static str)];

/// A mistake in variables, with a medium that needs no download.
const fn variable(words: Words, status: i32, sentence: &'static str) -> Mistake {
    Mistake { volume: "cp $D/win11.iso custom.iso", place: "", words, status, sentence }
}

const fn volume(volume: &'static str, words: Words, status: i32, sentence: &'static str) -> Mistake {
    Mistake { volume, place: "", words, status, sentence }
}

const fn place(place: &'static str, words: Words, status: i32, sentence: &'static str) -> Mistake {
    Mistake { volume: "", place, words, status, sentence }
}

#[rustfmt::skip]
const MISTAKES: &[Mistake] = &[
    variable(&[("VERSION", "13")], 58, ""),
    variable(&[("VERSION", "windows xp")], 58, ""),
    variable(&[("VERSION", "7")], 58, ""),
    volume("", &[("VERSION", "gone.iso")], 58, ""),
    volume("", &[("VERSION", "tiny11")], 68, ""),
    volume("", &[("VERSION", "ftp://example.com/a.iso")], 58, ""),
    volume("", &[("VERSION", "https://")], 58, ""),
    variable(&[("LANGUAGE", "klingon")], 62, ""),
    variable(&[("LANGUAGE", "germna")], 62, ""),
    variable(&[("EDITION", "a;b")], 2, ""),
    variable(&[("KEY", "abcde")], 2, ""),
    variable(&[("KEY", "ABCDE-ABCDE-ABCDE-ABCDE-ABCD!")], 2, ""),
    variable(&[("REGION", "korea")], 2, ""),
    variable(&[("KEYBOARD", "qwerty uiop")], 2, ""),
    variable(&[("USERNAME", "a/b")], 2, ""),
    variable(&[("USERNAME", "Administrator")], 2, ""),
    variable(&[("USERNAME", "a name that is far too long")], 2, ""),
    variable(&[("USERNAME", "trailing.")], 2, ""),
    variable(&[("PASSWORD", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")], 2, ""),
    variable(&[("PASSWORD", "a\tb")], 2, ""),
    variable(&[("PASSWORD_FILE", "/run/secrets/gone")], 2, ""),
    variable(&[("HOST", "12345")], 2, ""),
    variable(&[("WORKGROUP", "far too long a name")], 2, ""),
    variable(&[("DOMAIN", "corp.example.com")], 2, ""),
    variable(&[("DISK_SIZE", "big")], 73, ""),
    variable(&[("DISK_SIZE", "1K")], 73, ""),
    variable(&[("DISK_TYPE", "floppy")], 73, ""),
    variable(&[("DISK_TYPE", "scsi")], 73, ""),
    variable(&[("DISK_FMT", "vmdk")], 73, ""),
    variable(&[("DISK_NAME", "../x")], 73, ""),
    variable(&[("DISK_SIZE", "900P")], 73, ""),
    variable(&[("ALLOCATE", "Y"), ("DISK_SIZE", "900T")], 73, ""),
    variable(&[("RAM_SIZE", "lots")], 16, ""),
    variable(&[("RAM_SIZE", "64M"), ("RAM_MINIMUM", "2G")], 16, ""),
    variable(&[("CPU_CORES", "two")], 15, ""),
    variable(&[("MAC", "02:11")], 28, ""),
    variable(&[("MAC", "01:00:00:00:00:01")], 28, ""),
    variable(&[("NETWORK", "cloud")], 24, ""),
    variable(&[("BOOT_MODE", "windows_legacy")], 33, ""),
    variable(&[("DEVICE", "/dev/null")], 55, ""),
    variable(&[("DRIVERS", "/gone.iso")], 55, ""),
    variable(&[("STORAGE", "storage")], 13, ""),
    variable(&[("VERSION", "13"), ("LANGUAGE", "klingon"), ("RAM_SIZE", "lots")], 58, ""),
    volume("mkdir custom.iso", &[], 64, ""),
    volume("mkdir win11x64.iso; ln -s gone custom.iso", &[], 64, ""),
    volume(": > custom.iso", &[], 64, ""),
    volume("head -c 700000 $D/win11.iso > custom.iso", &[], 64, ""),
    volume("cp $D/win32.iso custom.iso", &[], 64, ""),
    volume("cp $D/arm.iso custom.iso", &[], 64, ""),
    volume("cp $D/linux.iso custom.iso", &[], 64, ""),
    volume("echo '<html>404</html>' > custom.iso", &[], 64, ""),
    volume("cp $D/installed custom.iso", &[], 64, ""),
    volume("mkfifo custom.iso", &[], 64, ""),
    volume("cp $D/win11.iso a.iso; cp $D/win11.iso b.iso", &[], 64, ""),
    volume("cp $D/win11.iso custom.iso; : > start.iso", &[], 64, ""),
    volume("cp $D/win11.iso custom.iso; mkdir custom.xml", &[], 1, ""),
    volume("cp $D/win11.iso custom.iso; echo '<unattend' > custom.xml", &[], 1, ""),
    volume("cp $D/win11.iso custom.iso; echo '<html></html>' > custom.xml", &[], 1, ""),
    volume("cp $D/win11.iso custom.iso; : > custom.xml", &[], 1, ""),
    volume("cp $D/win11.iso custom.iso; mkdir oem; truncate -s 5G oem/big.bin", &[], 1, ""),
    volume("cp $D/win11.iso custom.iso; mkdir oem; : > oem/con.txt", &[], 1, ""),
    volume("cp $D/win11.iso custom.iso; mkdir oem; truncate -s 2M oem/install.bat", &[], 1, ""),
    volume("cp $D/win11.iso custom.iso; mkdir oem; ln -s /etc/shadow oem/a", &[], 1, ""),
    volume("cp $D/win11.iso custom.iso; : > oem", &[], 1, ""),
    volume("cp $D/installed data.img; : > windows.boot; echo windows_legacy > windows.mode", &[], 33, ""),
    volume("cp $D/win11.iso custom.iso; cp $D/divided data.img", &[], 66, ""),
    volume("cp $D/win11.iso custom.iso; cp $D/divided data.img; echo ../x > windows.base", &[], 66, ""),
    volume("cp $D/win11.iso custom.iso; mkdir data.img", &[], 73, ""),
    volume("cp $D/win11.iso custom.iso; ln -s /gone/data.img data.img", &[], 73, ""),
    volume("cp $D/win11.iso custom.iso; mkdir windows.base", &[], 66, ""),
    volume("cp $D/win11.iso custom.iso; echo x > windows.uuid", &[], 1, ""),
    volume("cp $D/win11.iso custom.iso; echo x > windows_secure.tpm", &[], 33, ""),
    volume("cp $D/installed data.img; : > windows.boot; echo x > windows.mac", &[("NETWORK", "user")], 28, ""),
    place("mount -t tmpfs -o ro tmpfs /mnt", &[("VERSION", "10")], 13, ""),
    place("mount -t tmpfs -o size=1k,nr_inodes=2 tmpfs /mnt; : > /mnt/a", &[("VERSION", "10")], 13, ""),
    place("", &[("STORAGE", "/gone"), ("VERSION", "10")], 13, ""),
    place("", &[("STORAGE", "/etc/passwd"), ("VERSION", "10")], 13, ""),
    place("", &[("VERSION", "http://127.0.0.1:9000/missing.iso")], 68, ""),
    place("", &[("VERSION", "http://127.0.0.1:9000/page.iso")], 68, ""),
    place("", &[("VERSION", "http://127.0.0.1:9000/zip.iso")], 68, ""),
    place("", &[("VERSION", "http://127.0.0.1:9000/empty.iso")], 68, ""),
    place("", &[("VERSION", "http://127.0.0.1:9000/large.iso")], 68, ""),
    place("", &[("VERSION", "http://127.0.0.1:9000/loop.iso")], 68, ""),
    place("", &[("VERSION", "https://files.example.test/a.iso"), ("HTTPS_PROXY", "http://127.0.0.1:9000")], 68, ""),
    place("", &[("VERSION", "http://files.example.test/a.iso"), ("HTTP_PROXY", "http://127.0.0.1:9000")], 68, ""),
    place("", &[("VERSION", "https://files.example.test/a.iso"), ("HTTPS_PROXY", "http://127.0.0.1:9001")], 68, ""),
    place("", &[("VERSION", "https://files.example.test/a.iso"), ("HTTPS_PROXY", "http://127.0.0.1:9001"), ("SSL_CERT_FILE", "/gone.pem")], 68, ""),
    place("", &[("VERSION", "https://files.example.test/a.iso"), ("HTTPS_PROXY", "http://127.0.0.1:9001"), ("SSL_CERT_FILE", "/etc/passwd")], 68, ""),
    place("", &[("VERSION", "https://files.example.test/a.iso"), ("HTTPS_PROXY", "nonsense://x")], 68, ""),
    place("", &[("VERSION", "11"), ("MIDO", "N")], 68, ""),
];

#[test]
fn each_mistake_is_one_sentence_with_the_status_of_the_reference() -> Result<()> {
    if !runs_here("mistakes of users") {
        return Ok(());
    }
    let files = Files::make()?;
    each(MISTAKES, |Mistake { volume, place, words, status, sentence }| {
        let of = format!("{volume}{place} {words:?}");
        let world = World::new(&files)?;
        serve(world.place.listen(9000)?);
        let _microsoft = world.microsoft(9001)?;
        world.run(volume)?;
        let start = std::time::Instant::now();
        let mut pod = world.start(place, words)?;
        let ended = pod.wait(PATIENCE)?;
        let said = last_line(&pod);
        if std::env::var("BLESS").is_ok() {
            eprintln!("ROW\t{of}\t{status} {ended} {:?} {}\t{}\t{:?}", start.elapsed(), pod.stderr.text().trim().lines().count(), said, world.machine()?);
            return Ok(());
        }
        ensure!(ended == *status, "{of}: {ended}: {}{said}", pod.stdout.text());
        ensure!(said == *sentence, "{of}: {said}");
        Ok(())
    })
}
