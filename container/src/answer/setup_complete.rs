//! `SetupComplete.cmd`: Windows runs it as the system after its setup, and the first logon runs it
//! again, because Windows skips it for some product keys. Its first part runs once.

use super::Answers;
use super::release::Release;
use super::report::{Report, batch_line};
use super::script::{SCRIPTS, Script};
use super::xml::Secrets;
use crate::shared_folder;

const SYSTEM: &str = r"HKLM\SOFTWARE\Microsoft\Windows\CurrentVersion\Policies\System";
/// Folder with the drivers that the set-up disk brings.
const DRIVERS: &str = r"%SystemRoot%\Drivers";

pub(super) fn text(answers: &Answers, secrets: Secrets) -> String {
    let mut script = Script::new();
    script.line(format!("set \"DONE={SCRIPTS}\\SetupComplete.done\""));
    script.lines([
        "if not exist \"%DONE%\" call :setup",
        "if /i \"%~1\"==\"logon\" call :logon",
        "exit /b 0",
        "",
        ":setup",
    ]);
    power(&mut script);
    policies(answers, &mut script);
    drivers(&mut script);
    if let Some(key) = &answers.finish.key {
        let slmgr = r"%SystemRoot%\System32\slmgr.vbs";
        let key = secrets.of(&key.0);
        script.line(format!("cscript.exe //nologo \"{slmgr}\" /ipk {key}"));
    }
    script.line("echo done>\"%DONE%\"");
    script.line(batch_line(Report::SetupComplete));
    script.lines(["exit /b 0", "", ":logon"]);
    logon(answers, &mut script);
    script.finish()
}

/// The machine neither sleeps nor asks after it was killed, and its power button shuts it down, at
/// the lock screen too.
fn power(script: &mut Script) {
    const BUTTON: &str =
        "4f971e89-eebd-4455-a8de-9e59040e7347 7648efa3-dd9c-4e3e-b566-50f929386280 3";
    script.lines([
        "powercfg.exe /hibernate off",
        "powercfg.exe /change standby-timeout-ac 0",
        "powercfg.exe /change monitor-timeout-ac 0",
    ]);
    script.line(format!("powercfg.exe /setacvalueindex SCHEME_CURRENT {BUTTON}"));
    script.line("powercfg.exe /setactive SCHEME_CURRENT");
    script.number(SYSTEM, "shutdownwithoutlogon", 1);
    script.lines([
        "bcdedit.exe /set {default} recoveryenabled no",
        "bcdedit.exe /set {default} bootstatuspolicy ignoreallfailures",
    ]);
}

fn policies(answers: &Answers, script: &mut Script) {
    const PASSWORDS: &str =
        r"HKLM\SOFTWARE\Microsoft\Windows NT\CurrentVersion\PasswordLess\Device";
    const EDGE: &str = r"HKLM\SOFTWARE\Policies\Microsoft\Edge";
    const REMOTE: &str = r"HKLM\SOFTWARE\Policies\Microsoft\Windows NT\Terminal Services";
    const PROGRAMS: &str =
        r"HKLM\SOFTWARE\Microsoft\Windows NT\CurrentVersion\Terminal Server\TSAppAllowList";
    const UPDATES: &str = r"HKLM\SOFTWARE\Policies\Microsoft\Windows\WindowsUpdate\AU";
    const SHARES: &str = r"HKLM\SYSTEM\CurrentControlSet\Services\LanmanWorkstation\Parameters";
    script.line("net.exe accounts /maxpwage:unlimited");
    if matches!(answers.release, Release::Windows10 | Release::Windows11) {
        script.number(PASSWORDS, "DevicePasswordLessBuildVersion", 0);
    }
    script.number(EDGE, "HideFirstRunExperience", 1);
    // Programs of the guest as windows of the client.
    script.number(REMOTE, "fAllowUnlistedRemotePrograms", 1);
    script.number(PROGRAMS, "fDisabledAllowList", 1);
    if answers.as_reference {
        script.number(UPDATES, "NoAutoUpdate", 1);
        script.number(SHARES, "AllowInsecureGuestAuth", 1);
        script.number(SHARES, "RequireSecuritySignature", 0);
        // The rules of Network Discovery, and of File and Printer Sharing, in any language.
        for rules in ["-32752", "-28502"] {
            script.line(format!(
                "netsh.exe advfirewall firewall set rule group=\"@FirewallAPI.dll,{rules}\" new \
                 enable=yes"
            ));
        }
    }
    script.line("if exist C:\\Windows.old rmdir /s /q C:\\Windows.old");
}

/// Installs the agent, the balloon's service and the display's driver, which Windows Setup does not
/// install. The display's driver is last, because the screen flickers.
fn drivers(script: &mut Script) {
    let steps = [
        ("guest-agent\\qemu-ga-x86_64.msi", "msiexec.exe /i \"%FILE%\" /qn /norestart"),
        ("Balloon\\blnsvr.exe", "sc.exe query BalloonService >nul 2>&1 || \"%FILE%\" -i"),
        ("viogpudo\\viogpudo.inf", "pnputil.exe -i -a \"%FILE%\""),
    ];
    for (file, command) in steps {
        script.line(format!("set \"FILE={DRIVERS}\\{file}\""));
        script.line(format!("if exist \"%FILE%\" {command}"));
    }
}

/// Settings of the user who logs on, and the user's `install.bat` in a window of its own.
fn logon(answers: &Answers, script: &mut Script) {
    const ADVANCED: &str = r"HKCU\Software\Microsoft\Windows\CurrentVersion\Explorer\Advanced";
    const SEARCH: &str = r"HKCU\Software\Microsoft\Windows\CurrentVersion\Search";
    const BANNER: &str = r"HKCU\Control Panel\UnsupportedHardwareNotificationCache";
    script.line(batch_line(Report::LoggedOn));
    // The copies of the answer file have the password. No pass needs them any more.
    for name in ["unattend.xml", "unattend-original.xml"] {
        script.line(format!("del /f /q \"%SystemRoot%\\Panther\\{name}\" 2>nul"));
    }
    // Setup's copy of the set-up disk, with the answer file and all of /oem.
    let copy = "\"%SystemRoot%\\ConfigSetRoot\"";
    script.line(format!("if exist {copy} rmdir /s /q {copy}"));
    script.number(ADVANCED, "HideFileExt", 0);
    if matches!(answers.release, Release::Windows10 | Release::Windows11) {
        script.number(ADVANCED, "ShowTaskViewButton", 0);
        script.number(SEARCH, "SearchboxTaskbarMode", 0);
    }
    if answers.release == Release::Windows11 {
        for button in ["ShowCopilotButton", "TaskbarDa", "TaskbarMn"] {
            script.number(ADVANCED, button, 0);
        }
        script.number(BANNER, "SV1", 0);
        script.number(BANNER, "SV2", 0);
    }
    if answers.finish.share {
        share(script);
    }
    script.line(format!("start \"Install\" cmd.exe /d /c call \"{SCRIPTS}\\RunInstall.cmd\""));
    script.line("exit /b 0");
}

/// The shared folder as a drive and on the desktop, as in the reference image. The network may need
/// a moment. The logon has the account's password, which the share asks for.
fn share(script: &mut Script) {
    let address = format!("\\\\host.lan\\{}", shared_folder::NAME);
    let link = r"%USERPROFILE%\Desktop\Shared";
    script.line(format!("if not exist \"{link}\" mklink /d \"{link}\" {address}"));
    // Explorer does not have the rights of an administrator, as this script does.
    script.number(SYSTEM, "EnableLinkedConnections", 1);
    script.line("for %%N in (1 2 3 4 5 6) do if not exist Z:\\ (");
    script.line(format!("  net.exe use Z: {address} /persistent:yes >nul 2>&1"));
    script.line("  if not exist Z:\\ ping.exe -n 4 127.0.0.1 >nul");
    script.line(")");
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
        text(&from_settings::answers(&settings, &target, machine).0, Secrets::Shown)
    }

    #[test]
    fn the_first_part_runs_once_and_the_display_comes_last() {
        let script = made(&[("KEY", "ABCDE-12345-ABCDE-12345-ABCDE")]);
        let parts = [
            "if not exist \"%DONE%\" call :setup",
            "call :logon",
            "\r\n:setup\r\n",
            "powercfg.exe /hibernate off",
            "guest-agent",
            "viogpudo.inf",
            "/ipk ABCDE-12345-ABCDE-12345-ABCDE",
            "echo done>\"%DONE%\"",
            ">COM1 echo transom-report: setup-complete",
            "\r\n:logon\r\n",
            "Panther\\unattend.xml",
            "ConfigSetRoot",
            "HideFileExt",
            "RunInstall.cmd",
        ];
        let places: Vec<_> = parts.iter().map(|part| script.find(part).expect(part)).collect();
        assert!(places.is_sorted(), "{places:?}");
    }

    #[test]
    fn the_shared_folder_is_a_drive_and_on_the_desktop() {
        assert!(!made(&[]).contains("host.lan"), "no folder is mounted");
        let mut script = Script::new();
        share(&mut script);
        let script = script.finish();
        for line in [
            "if not exist \"%USERPROFILE%\\Desktop\\Shared\" \
             mklink /d \"%USERPROFILE%\\Desktop\\Shared\" \\\\host.lan\\Data",
            r"  net.exe use Z: \\host.lan\Data /persistent:yes >nul 2>&1",
        ] {
            assert!(script.lines().any(|it| it == line), "{script}");
        }
    }

    #[test]
    fn old_versions_get_only_settings_that_they_have() {
        let script = made(&[("VERSION", "2012")]);
        for part in ["TaskbarDa", "PasswordLess", "/ipk"] {
            assert!(!script.contains(part), "{part}");
        }
    }
}
