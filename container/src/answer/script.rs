//! Batch files for Windows' command interpreter: their lines, and their quoting.

/// The line end of Windows.
pub(super) const CRLF: &str = "\r\n";
/// Folder of the setup scripts in Windows, which Setup itself defines.
pub(super) const SCRIPTS: &str = r"%SystemRoot%\Setup\Scripts";
/// Folder of the user's files in Windows, as in the reference image.
pub(super) const OEM: &str = r"C:\OEM";

/// The text of a batch file.
#[derive(Debug, Default)]
pub(super) struct Script {
    text: String,
}

impl Script {
    /// Starts with what every script needs: no echo, and extensions on.
    pub(super) fn new() -> Self {
        let mut script = Self::default();
        script.line("@echo off");
        script.line("setlocal EnableExtensions DisableDelayedExpansion");
        script
    }

    pub(super) fn line(&mut self, line: impl AsRef<str>) {
        self.text.push_str(line.as_ref());
        self.text.push_str(CRLF);
    }

    pub(super) fn lines<const N: usize>(&mut self, lines: [&str; N]) {
        lines.iter().for_each(|line| self.line(line));
    }

    /// Sets a number in the registry.
    pub(super) fn number(&mut self, key: &str, name: &str, value: u32) {
        self.line(reg_number(key, name, value));
    }

    pub(super) fn finish(self) -> String {
        self.text
    }
}

/// The command that sets a number in the registry.
pub(super) fn reg_number(key: &str, name: &str, value: u32) -> String {
    format!("reg.exe add \"{key}\" /v \"{name}\" /t REG_DWORD /d {value} /f")
}

/// The text as an argument in quotation marks within a batch file. Quotation marks themselves
/// cannot be written there, and the callers' types exclude them.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "").replace('%', "%%"))
}
