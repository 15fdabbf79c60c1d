//! The user's `install.bat`: its text, COMMAND at its end, and the script that runs it.

use super::report::{Report, batch, batch_line};
use super::script::{CRLF, OEM, Script};
use crate::setup_disk::text;

/// The script that runs `install.bat` in a window of its own and reports its end.
pub(super) fn runner(log: bool) -> String {
    let install = format!("{OEM}\\install.bat");
    let to = if log { format!(" > {OEM}\\install.log 2>&1") } else { String::new() };
    let mut script = Script::new();
    script.line(format!("if not exist {install} goto ready"));
    script.line(batch_line(Report::InstallStarted));
    script.line(format!("cd /d {OEM}"));
    script.line(format!("cmd.exe /d /c {install}{to}"));
    script.line(batch("install-ended %ERRORLEVEL%"));
    script.line(":ready");
    script.line(batch_line(Report::Ready));
    script.finish()
}

/// The text of `install.bat`: the user's, with line ends of Windows and in UTF-8, and the command
/// after it. `None` without both.
pub(super) fn install_bat(user: Option<&[u8]>, command: Option<&str>) -> Option<Vec<u8>> {
    let mut made = user.map(text::script).unwrap_or_default();
    if user.is_none() && command.is_none() {
        return None;
    }
    if let Some(command) = command {
        if user.is_none() {
            made.extend_from_slice(format!("@echo off{CRLF}").as_bytes());
        }
        if !made.is_empty() && !made.ends_with(b"\n") {
            made.extend_from_slice(CRLF.as_bytes());
        }
        if !command.is_ascii() {
            made.extend_from_slice(format!("chcp 65001 >nul{CRLF}").as_bytes());
        }
        made.extend_from_slice(format!("{command}{CRLF}").as_bytes());
    }
    Some(made)
}

#[cfg(test)]
mod test {
    use super::*;

    fn made(user: Option<&[u8]>, command: Option<&str>) -> Option<String> {
        install_bat(user, command).map(|it| String::from_utf8(it).unwrap())
    }

    #[test]
    fn the_command_follows_the_users_script() {
        let both = made(Some(b"echo 1\necho 2"), Some("echo 3")).unwrap();
        assert_eq!(both, "echo 1\r\necho 2\r\necho 3\r\n");
        assert_eq!(made(Some(b"echo 1\r\n"), None).as_deref(), Some("echo 1\r\n"));
        assert_eq!(made(None, Some("echo 3")).as_deref(), Some("@echo off\r\necho 3\r\n"));
        assert_eq!(made(None, None), None);
        let other = made(None, Some("echo é")).unwrap();
        assert!(other.contains("chcp 65001 >nul\r\necho é\r\n"), "{other}");
    }

    #[test]
    fn wide_text_becomes_what_the_interpreter_reads() {
        let wide: Vec<u8> = "\u{feff}echo é\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert_eq!(made(Some(&wide), None).as_deref(), Some("echo é\r\n"));
        let wide: Vec<u8> = "\u{feff}a\r\n".encode_utf16().flat_map(u16::to_be_bytes).collect();
        assert_eq!(made(Some(&wide), None).as_deref(), Some("a\r\n"));
        assert_eq!(made(Some(b"\xef\xbb\xbfa"), None).as_deref(), Some("a"));
        assert_eq!(install_bat(Some(b"\xe9\n"), None).unwrap(), b"\xe9\r\n");
    }

    #[test]
    fn the_log_is_beside_the_script() {
        assert!(
            runner(true).contains(r"cmd.exe /d /c C:\OEM\install.bat > C:\OEM\install.log 2>&1")
        );
        assert!(!runner(false).contains("install.log"));
    }
}
