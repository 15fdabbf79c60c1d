//! Upgrade images that wimlib makes, in the form of Microsoft's.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use host::testutil::noise::Noise;

use crate::programs::run;

/// The folder of each image, in order.
pub(crate) const IMAGES: [&str; 5] = ["media", "pe", "setup", "home", "pro"];
/// Name, edition and type of each image.
const PROPERTIES: [(&str, &str, &str); 5] = [
    ("Windows Setup Media", "", ""),
    ("Microsoft Windows PE (x64)", "WindowsPE", "WindowsPE"),
    ("Microsoft Windows Setup (x64)", "WindowsPE", "WindowsPE"),
    ("Windows 11 Home", "Core", "Client"),
    ("Windows 11 Pro", "Professional", "Client"),
];

/// The program that makes them.
pub(crate) const WIMLIB: &str = "wimlib-imagex";

/// Makes `x.esd` in a folder, and beside it a folder for each of its images.
pub(crate) fn esd(folder: &Path, options: &[&str]) -> PathBuf {
    fill(folder);
    for (number, (name, edition, kind)) in PROPERTIES.iter().enumerate() {
        let mut words = match number {
            0 => vec!["capture", IMAGES[number], "x.esd", name, "--solid", "--compress=LZMS"],
            _ => vec!["append", IMAGES[number], "x.esd", name],
        };
        words.extend(["--no-acls", "--image-property=WINDOWS/ARCH=9"]);
        let properties = [
            format!("--image-property=WINDOWS/EDITIONID={edition}"),
            format!("--image-property=WINDOWS/INSTALLATIONTYPE={kind}"),
        ];
        if !edition.is_empty() {
            words.extend(properties.iter().map(String::as_str));
            words.extend([
                "--image-property=WINDOWS/VERSION/BUILD=26100",
                "--image-property=WINDOWS/LANGUAGES/LANGUAGE=de-DE",
                "--image-property=WINDOWS/LANGUAGES/DEFAULT=de-DE",
            ]);
        }
        words.extend(options);
        run(WIMLIB, &words, folder);
    }
    folder.join("x.esd")
}

fn fill(folder: &Path) {
    let mut noise = Noise::new(7);
    let put = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let mut random = |length: usize| -> Vec<u8> {
        (0..length).map(|_| noise.below(256).to_le_bytes()[0]).collect()
    };
    let program = fs::read("/usr/bin/wimlib-imagex").unwrap();
    let library = fs::read(std::env::current_exe().unwrap()).unwrap();
    let library = &library[..library.len().min(3 << 20)];
    // Sequences of numbers, for which LZMS has delta matches.
    let numbers: Vec<u8> =
        (0_u32..60_000).flat_map(|it| (it * 7 + it / 13).to_le_bytes()).collect();
    put("media/boot/etfsboot.com", &[0x90; 4096]);
    put("media/efi/microsoft/boot/efisys.bin", &random(65536));
    put("media/efi/microsoft/boot/efisys_noprompt.bin", &random(65536));
    put("media/efi/boot/bootx64.efi", &program);
    put("media/setup.exe", &program);
    put("media/empty.txt", b"");
    put("media/sources/zürich 東京 🗻.txt", "ü".repeat(9000).as_bytes());
    // A directory of several sectors.
    for number in 0..150 {
        put(
            &format!("media/sources/de-de/a-long-name-{number}.mui"),
            format!("{number}").as_bytes(),
        );
    }
    put("pe/Windows/System32/winload.efi", library);
    put("pe/Windows/System32/a.dll", &program);
    put("pe/numbers", &numbers);
    put("setup/Windows/System32/a.dll", &program);
    put("setup/sources/noise", &random(200_000));
    put("setup/sources/zeros", &vec![0; 200_001]);
    put("setup/short", b"x");
    fs::hard_link(folder.join("setup/short"), folder.join("setup/linked")).unwrap();
    symlink("short", folder.join("setup/link")).unwrap();
    for edition in ["home", "pro"] {
        put(&format!("{edition}/Windows/System32/ntoskrnl.exe"), library);
        put(&format!("{edition}/edition"), edition.as_bytes());
        put(&format!("{edition}/numbers"), &numbers);
    }
}
