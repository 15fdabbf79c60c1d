//! `ErrorHandler.cmd`: Windows Setup runs it when it fails. It writes the last lines of Setup's
//! logs to the serial port, because the disk of a failed installation starts nothing that could.
//!
//! In Windows PE the script is called with an argument: `begin` before Setup's first step, `logs`
//! by the script that installs without Setup.

use super::report::{Report, Step, batch, batch_line, batch_log};
use super::script::Script;

/// Lines of each log. Setup's log of errors is short, and more telling.
const ACTIONS: (&str, u32) = ("setupact.log", 10);
const ERRORS: (&str, u32) = ("setuperr.log", 20);
/// Letters that Windows PE may have given to the disk of an earlier attempt.
const LETTERS: &str = "C D E F G H";
/// Folder of Setup's own scripts, which Windows Setup looks for in Windows PE, too.
const SCRIPTS: &str = r"%SystemRoot%\Setup\Scripts";

pub(super) fn text() -> String {
    let mut script = Script::new();
    script.line(batch_line(Report::LogBegins));
    script.lines([
        "call :folder \"%SystemRoot%\\Panther\"",
        "call :folder \"%SystemDrive%\\$WINDOWS.~BT\\Sources\\Panther\"",
        // Windows PE runs from a disk in memory. The logs of an earlier attempt are on the disk.
        "if /i not \"%SystemDrive%\"==\"X:\" goto told",
        "call :tail \"%SystemRoot%\\Logs\\DISM\\dism.log\" 10",
    ]);
    script.line(format!(
        "for %%d in ({LETTERS}) do call :folder \"%%d:\\$WINDOWS.~BT\\Sources\\Panther\" & \
         call :folder \"%%d:\\Windows\\Panther\""
    ));
    script.lines([
        ":told",
        "if /i \"%~1\"==\"logs\" exit /b 0",
        "if /i \"%~1\"==\"begin\" goto begin",
    ]);
    script.line(batch_line(Report::Failed(Step::Setup)));
    script.lines(["exit /b 0", "", ":begin"]);
    script.line(format!("md \"{SCRIPTS}\" 2>nul"));
    script.line(format!("copy /y \"%~f0\" \"{SCRIPTS}\\ErrorHandler.cmd\" >nul"));
    script.lines(["exit /b 0", "", ":folder"]);
    for (name, lines) in [ACTIONS, ERRORS] {
        script.line(format!("call :tail \"%~1\\{name}\" {lines}"));
    }
    script.lines(["exit /b 0", "", ":tail"]);
    tail(&mut script);
    script.finish()
}

/// Writes the last lines of the file in the first argument; their number is the second one. Only
/// commands of the interpreter itself, because Windows PE lacks many programs.
fn tail(script: &mut Script) {
    script.lines([
        "if not exist \"%~1\" exit /b 0",
        "set \"COUNT=0\"",
        "for /f \"usebackq delims=\" %%l in (\"%~1\") do set /a COUNT+=1 >nul",
        "if %COUNT%==0 exit /b 0",
        "set /a FIRST=COUNT-%2",
        "set \"SKIP=\"",
        "if %FIRST% gtr 0 set \"SKIP=skip=%FIRST%\"",
    ]);
    script.line(batch("log %~1:"));
    script.line(format!(
        "for /f \"usebackq %SKIP% delims=\" %%l in (\"%~1\") do {}",
        batch_log("%%l")
    ));
    script.line("exit /b 0");
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_tail_of_both_logs_precedes_the_failure() {
        let script = text();
        let parts = [
            ">COM1 echo transom-report: log-begins",
            "call :folder \"%SystemRoot%\\Panther\"",
            "for %%d in (C D E F G H)",
            ">COM1 echo transom-report: failed setup",
            "\r\n:begin\r\n",
            "copy /y \"%~f0\"",
            "\r\n:folder\r\n",
            "setupact.log\" 10",
            "setuperr.log\" 20",
            "\r\n:tail\r\n",
            ">COM1 echo transom-report: log %~1:",
            "do >COM1 echo transom-report: log %%l",
        ];
        let places: Vec<_> = parts.iter().map(|part| script.find(part).expect(part)).collect();
        assert!(places.is_sorted(), "{places:?}");
    }

    #[test]
    fn every_call_and_jump_has_its_label() {
        let script = text();
        for word in ["goto ", "call :"] {
            let rest = script.split(word).skip(1);
            for label in rest.filter_map(|rest| rest.split_whitespace().next()) {
                assert!(script.contains(&format!("\r\n:{label}\r\n")), "{label}");
            }
        }
    }
}
