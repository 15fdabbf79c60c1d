//! The script that installs in Windows PE without Windows Setup: Microsoft's tools partition the
//! disk, apply the image, and make it bootable. Nothing checks the hardware, and the answer file's
//! later passes run as usual.

use super::release::Selection;
use super::report::{Report, Step, batch, batch_line};
use super::script::{Script, quoted};
use super::windows_pe::{EFI_SIZE, RESERVED_SIZE};
use super::{AUTOUNATTEND, Answers, ERROR_HANDLER};

/// Letters of drives that Windows PE may have given.
const LETTERS: &str = "C D E F G H I J K L M N O P";
/// Letters for the new partitions, as diskpart takes them: without a colon.
const EFI: char = 'S';
const WINDOWS: char = 'W';

pub(super) fn text(answers: &Answers) -> String {
    let mut script = Script::new();
    // Without a serial port, the output of DISM stays on the screen.
    script.line("set \"OUT=COM1\"");
    script.line(format!("{} || set \"OUT=CON\"", batch_line(Report::WindowsPe)));
    script.lines([
        "set \"SETUP=%~d0\"",
        "set \"DRIVERS=%SETUP%\\$WinPEDriver$\"",
        "for /r \"%DRIVERS%\" %%i in (*.inf) do drvload.exe \"%%i\"",
    ]);
    find_image(&mut script);
    partition(answers.machine.disk, &mut script);
    apply(answers, &mut script);
    copy(answers, &mut script);
    // Last: from here on, a start of the container boots the disk, whatever it lacks.
    boot(&mut script);
    script.line(batch_line(Report::Applied));
    script.lines(["wpeutil.exe reboot", "exit /b 0", "", ":failed"]);
    script.line(format!("call \"%SETUP%\\{}\" logs", ERROR_HANDLER.replace('/', "\\")));
    script.line(batch("failed %STEP%"));
    script.lines(["echo The installation failed in the step %STEP%.", "cmd.exe /k", "exit /b 1"]);
    script.finish()
}

fn step(step: Step, script: &mut Script) {
    script.line("");
    script.line(format!("set \"STEP={}\"", step.word()));
    script.line("echo Step %STEP%");
    script.line(batch_line(Report::Began(step)));
}

fn find_image(script: &mut Script) {
    step(Step::FindImage, script);
    script.line("set \"IMAGE=\"");
    script.line(format!(
        "for %%d in ({LETTERS}) do for %%f in (wim esd swm) do if not defined IMAGE if exist \
         \"%%d:\\sources\\install.%%f\" set \"IMAGE=%%d:\\sources\\install.%%f\""
    ));
    script.line("if not defined IMAGE goto failed");
    script.line("set \"PARTS=\"");
    script.line("if /i \"%IMAGE:~-4%\"==\".swm\" set \"PARTS=/SWMFile:%IMAGE:~0,-4%*.swm\"");
}

fn partition(disk: u32, script: &mut Script) {
    step(Step::Partition, script);
    let lines = [
        // A disk whose driver was loaded just now may not be listed yet.
        "rescan".to_owned(),
        format!("select disk {disk}"),
        "clean".to_owned(),
        "convert gpt".to_owned(),
        format!("create partition efi size={EFI_SIZE}"),
        "format quick fs=fat32 label=System".to_owned(),
        format!("assign letter={EFI}"),
        format!("create partition msr size={RESERVED_SIZE}"),
        "create partition primary".to_owned(),
        "format quick fs=ntfs label=Windows".to_owned(),
        format!("assign letter={WINDOWS}"),
    ];
    script.line("(");
    for line in lines {
        script.line(format!("  echo {line}"));
    }
    script.line(") > X:\\partition.txt");
    script.line("diskpart.exe /s X:\\partition.txt || goto failed");
}

fn apply(answers: &Answers, script: &mut Script) {
    step(Step::ApplyImage, script);
    let image = match answers.image.selection {
        Selection::Index(index) => format!("/Index:{index}"),
        Selection::Name | Selection::Key => format!("/Name:{}", quoted(&answers.image.name)),
    };
    script.line(format!(
        ">%OUT% dism.exe /Apply-Image /ImageFile:\"%IMAGE%\" %PARTS% {image} \
         /ApplyDir:{WINDOWS}:\\ || goto failed"
    ));
}

fn boot(script: &mut Script) {
    step(Step::Boot, script);
    script.line(format!("bcdboot.exe {WINDOWS}:\\Windows /s {EFI}: /f UEFI || goto failed"));
    // The firmware starts Windows next, whatever its order was.
    script.line("bcdedit.exe /set {fwbootmgr} bootsequence {bootmgr}");
}

/// The answer file with its passes that are left, drivers, and the user's files. Without Windows
/// Setup, DISM obeys the pass offlineServicing. Robocopy's statuses below 8 are successes.
fn copy(answers: &Answers, script: &mut Script) {
    step(Step::Copy, script);
    script.line(format!("md {WINDOWS}:\\Windows\\Panther 2>nul"));
    script.line(format!(
        "copy /y \"%SETUP%\\{AUTOUNATTEND}\" {WINDOWS}:\\Windows\\Panther\\unattend.xml || \
         goto failed"
    ));
    if !super::offline(answers).is_empty() {
        script.line(format!(
            "dism.exe /Image:{WINDOWS}:\\ \
             /Apply-Unattend:{WINDOWS}:\\Windows\\Panther\\unattend.xml || goto failed"
        ));
    }
    script.line(format!(
        "if exist \"%DRIVERS%\" dism.exe /Image:{WINDOWS}:\\ /Add-Driver /Driver:\"%DRIVERS%\" \
         /Recurse || goto failed"
    ));
    for (from, to) in [("$$", "\\Windows"), ("$1", "\\")] {
        script.line(format!("set \"FROM=%SETUP%\\$OEM$\\{from}\""));
        script.line(format!(
            "if exist \"%FROM%\" robocopy.exe \"%FROM%\" {WINDOWS}:{to} /e /r:1 /w:1 & \
             if errorlevel 8 goto failed"
        ));
    }
}

#[cfg(test)]
mod test {
    use super::super::from_settings;
    use super::super::target::Target;
    use super::*;
    use crate::settings::environment;
    use crate::settings::settle::Sizes;

    fn made(words: &[(&str, &str)]) -> String {
        let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        let settings = environment::read(&words).unwrap().settings;
        let target = Target::of_version(&settings.windows).unwrap();
        let bus = settings.disk.controller.value;
        let machine = from_settings::machine(&settings, &Sizes::default(), bus);
        text(&from_settings::answers(&settings, &target, machine).0)
    }

    #[test]
    fn the_steps_are_in_their_order() {
        let script = made(&[]);
        let parts = [
            ">COM1 echo transom-report: windows-pe || set \"OUT=CON\"",
            "drvload.exe",
            "set \"STEP=find-image\"",
            ">COM1 echo transom-report: began find-image",
            "echo select disk 1",
            "echo convert gpt",
            "echo assign letter=S\r\n",
            "diskpart.exe /s",
            ">%OUT% dism.exe /Apply-Image",
            "/Name:\"Windows 11 Pro\" /ApplyDir:W:\\",
            "unattend.xml",
            "/Add-Driver",
            "robocopy.exe",
            "bcdboot.exe W:\\Windows /s S: /f UEFI",
            ">COM1 echo transom-report: applied",
            "wpeutil.exe reboot",
            ":failed",
            "ErrorHandler.cmd\" logs",
            ">COM1 echo transom-report: failed %STEP%",
        ];
        let places: Vec<_> = parts.iter().map(|part| script.find(part).expect(part)).collect();
        assert!(places.is_sorted(), "{places:?}");
    }

    #[test]
    fn disk_and_image_are_those_of_the_settings() {
        let script = made(&[("DISK_TYPE", "nvme"), ("VERSION", "11e")]);
        assert!(script.contains("select disk 0") && script.contains("/Index:1 "));
        let core = made(&[("VERSION", "2025"), ("EDITION", "core")]);
        assert!(core.contains("/Name:\"Windows Server 2025 SERVERSTANDARDCORE\""), "{core}");
    }

    #[test]
    fn the_pass_for_the_image_is_obeyed_if_there_is_one() {
        let line =
            "dism.exe /Image:W:\\ /Apply-Unattend:W:\\Windows\\Panther\\unattend.xml || goto";
        assert!(made(&[("COMPAT", "dockur")]).contains(line));
        assert!(!made(&[]).contains("/Apply-Unattend"));
    }

    #[test]
    fn every_jump_has_its_label() {
        let script = made(&[]);
        let jumps = script.split("goto ").skip(1).filter_map(|rest| rest.split_whitespace().next());
        for label in jumps {
            assert!(script.contains(&format!("\r\n:{label}\r\n")), "{label}");
        }
    }
}
