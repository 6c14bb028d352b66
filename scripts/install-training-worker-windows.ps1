<#
.SYNOPSIS
Makes this machine a host of a Strata fleet, or undoes it. Running it again is harmless: it upgrades.

.DESCRIPTION
Installs the agent for the current user, joins the fleet of the hub at -Hub, and registers a Scheduled Task that starts the
agent with the machine. The join token, which 'strata invite' prints, comes from -TokenFile, from the variable
STRATA_JOIN_TOKEN, or from a prompt, never from the command line. Registering the task takes an elevated PowerShell.

.EXAMPLE
.\install-training-worker-windows.ps1 -Hub https://hub.example:8443 -TokenFile token.txt

.EXAMPLE
.\install-training-worker-windows.ps1 -Uninstall
#>
[CmdletBinding(PositionalBinding = $false)]
param(
    # Address of the hub, https://...
    [string] $Hub = '',
    # Read the join token from this file (default: STRATA_JOIN_TOKEN, or a prompt).
    [string] $TokenFile = '',
    # Install this wheel, folder or package name (default: the clone that holds this script).
    [string] $From = '',
    # Name of this machine in the fleet (default: its host name).
    [string] $Name = '',
    # Python 3.11 or newer.
    [string] $Python = 'python',
    [string] $Prefix = (Join-Path $env:LOCALAPPDATA 'Strata'),
    # Print the commands without running them.
    [switch] $DryRun,
    # Leave the fleet and remove everything, also files of jobs.
    [switch] $Uninstall,
    # With -Uninstall: go on if the hub cannot be reached.
    [switch] $Force
)

Set-StrictMode -Version Latest
$ErrorActionPreference = 'Stop'

# Out of the environment at once: no program that is started here is to inherit it.
$carried = $env:STRATA_JOIN_TOKEN
$env:STRATA_JOIN_TOKEN = $null

$task = 'Strata agent'
$venv = Join-Path $Prefix 'venv'
$state = Join-Path $Prefix 'state'
$work = Join-Path $Prefix 'work'
$programs = Join-Path $venv 'Scripts'
$interpreter = Join-Path $programs 'python.exe'
$strata = Join-Path $programs 'strata.exe'
if (-not $From) { $From = Split-Path -Parent $PSScriptRoot }
if (Test-Path $From) { $From = (Resolve-Path $From).Path }

# A program and its arguments, none of which is ever a secret; what it should read comes through -Text.
function Invoke-Program {
    param([string] $Program, [string[]] $Arguments, [string] $Text = '')
    if ($DryRun) {
        Write-Output "+ $Program $($Arguments -join ' ')"
        return
    }
    if ($Text) {
        $Text | & $Program @Arguments
    }
    else {
        & $Program @Arguments
    }
    if ($LASTEXITCODE -ne 0) {
        throw "$Program $($Arguments[0]) failed with status $LASTEXITCODE"
    }
}

function Test-Interpreter {
    & $Python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))'
    if ($LASTEXITCODE -ne 0) {
        throw "$Python is not Python 3.11 or newer; name another one with -Python"
    }
}

function Get-JoinToken {
    if ($TokenFile) { return (Get-Content -Raw -LiteralPath $TokenFile).Trim() }
    if ($carried) { return $carried.Trim() }
    $asked = Read-Host -Prompt 'Join token' -AsSecureString
    return [System.Net.NetworkCredential]::new('', $asked).Password.Trim()
}

# The credentials are for this user and the system only.
function New-PrivateFolder {
    param([string] $Path)
    if ($DryRun) {
        Write-Output "+ mkdir $Path"
        return
    }
    New-Item -ItemType Directory -Force -Path $Path | Out-Null
    $user = [System.Security.Principal.WindowsIdentity]::GetCurrent().Name
    Invoke-Program 'icacls.exe' @($Path, '/inheritance:r', '/grant:r', "${user}:(OI)(CI)F", '*S-1-5-18:(OI)(CI)F', '/Q')
}

function Install-Package {
    if (-not (Test-Path $interpreter)) {
        Invoke-Program $Python @('-m', 'venv', $venv)
    }
    $pip = @('-m', 'pip', '--disable-pip-version-check')
    $pins = Join-Path (Split-Path -Parent $PSScriptRoot) 'constraints-agent.txt'
    if (Test-Path $pins) {
        # Only packages with a pinned hash come from the index, also for building the package.
        Invoke-Program $interpreter ($pip + @('install', '--quiet', '--require-hashes', '-r', $pins))
        Invoke-Program $interpreter ($pip + @('install', '--quiet', '--upgrade', '--no-deps', '--no-build-isolation', "${From}[agent]"))
        Invoke-Program $interpreter ($pip + @('check'))
    } else {
        Invoke-Program $interpreter ($pip + @('install', '--quiet', '--upgrade', "${From}[agent]"))
    }
}

function Join-Fleet {
    Invoke-Program $strata @('agent', 'check', '--state', $state, '--work', $work)
    $arguments = @('join', $Hub, '--state', $state)
    if ($Name) { $arguments += @('--name', $Name) }
    $joined = Test-Path (Join-Path $state 'identity\hub.json')
    if ($joined -or $DryRun) {
        Invoke-Program $strata $arguments
    }
    else {
        Invoke-Program $strata $arguments -Text (Get-JoinToken)
    }
}

function Register-Agent {
    $user = [System.Security.Principal.WindowsIdentity]::GetCurrent().Name
    if ($DryRun) {
        Write-Output "+ Register-ScheduledTask '$task': $strata agent --state $state --work $work"
        return
    }
    $arguments = "agent --state `"$state`" --work `"$work`" --log-format json"
    $definition = @{
        Action    = New-ScheduledTaskAction -Execute $strata -Argument $arguments -WorkingDirectory $Prefix
        Trigger   = New-ScheduledTaskTrigger -AtStartup
        Principal = New-ScheduledTaskPrincipal -UserId $user -LogonType S4U -RunLevel Limited
        # The agent ends by itself when asked; a task is ended after three days unless its limit is 0.
        Settings  = New-ScheduledTaskSettingsSet -MultipleInstances IgnoreNew -ExecutionTimeLimit 0 -AllowStartIfOnBatteries -DontStopIfGoingOnBatteries -RestartCount 999 -RestartInterval (New-TimeSpan -Minutes 1)
    }
    Stop-ScheduledTask -TaskName $task -ErrorAction SilentlyContinue
    Register-ScheduledTask -TaskName $task @definition -Force | Out-Null
    Start-ScheduledTask -TaskName $task
    Write-Output "the agent runs as the Scheduled Task '$task'"
}

function Remove-Agent {
    if (-not $DryRun -and (Get-ScheduledTask -TaskName $task -ErrorAction SilentlyContinue)) {
        Stop-ScheduledTask -TaskName $task
        Unregister-ScheduledTask -TaskName $task -Confirm:$false
    }
    if ((Test-Path $strata) -and (Test-Path $state)) {
        $arguments = @('leave', '--state', $state)
        if ($Force) { $arguments += '--force' }
        Invoke-Program $strata $arguments
    }
    if ($DryRun) {
        Write-Output "+ rmdir $Prefix"
    }
    elseif (Test-Path $Prefix) {
        Remove-Item -Recurse -Force -LiteralPath $Prefix
    }
    Write-Output 'the agent is removed'
}

if ($Uninstall) {
    Remove-Agent
    return
}
if (-not $Hub) { throw '-Hub is missing' }
Test-Interpreter
New-PrivateFolder $Prefix
New-PrivateFolder $state
Install-Package
Join-Fleet
Register-Agent
